"""The errors raised when reading data; users import them from `sources`."""

import urllib.error


class DataNotFoundError(FileNotFoundError):
    """The data is neither on disk nor downloadable; the message says which file to put where."""


class CorruptDataError(ValueError):
    """Files exist but are damaged: checksum, record check, count or contents are wrong."""


def reason(error: Exception) -> str:
    """The first line of the error, without urllib's own wrapping."""
    if type(error) is urllib.error.URLError:
        error = error.reason
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
