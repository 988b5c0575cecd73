"""The errors that reading data raises; `sources` is where users import them from."""

import urllib.error


class DataNotFoundError(FileNotFoundError):
    """The data is neither on disk nor to be had over the network; says where to put which file."""


class CorruptDataError(ValueError):
    """Files are there but damaged: checksum, record check, count or contents are wrong."""


def reason(error: Exception) -> str:
    """The first line of what went wrong, without urllib's own wrapping."""
    if type(error) is urllib.error.URLError:
        error = error.reason
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
