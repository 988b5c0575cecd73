"""The errors raised when reading data; users import them from `sources`."""

import urllib.error
from collections.abc import Sequence

_NAMED = 10


class DataNotFoundError(FileNotFoundError):
    """The data is neither on disk nor downloadable; the message says which file to put where."""


class CorruptDataError(ValueError):
    """Files exist but are damaged: checksum, record check, count or contents are wrong."""


class UnusableFilesError(CorruptDataError):
    """Files of one's own data cannot be used. The message has a line for each of the first ten.

    Args:
      folder: what the paths in the message are relative to.
      wrong: (path, what is wrong with it) of each file, at least one.
    """

    def __init__(self, folder: str, wrong: Sequence[tuple[str, str]]):
        count = f"{len(wrong)} file{'s' if len(wrong) > 1 else ''}"
        lines = [f"{count} in {folder} cannot be used; mend or remove them:"]
        for path, problem in wrong[:_NAMED]:
            lines.append(f"  {path.removeprefix(folder).lstrip('/')}: {problem}")
        if len(wrong) > _NAMED:
            lines.append(f"  and {len(wrong) - _NAMED} more")
        super().__init__("\n".join(lines))
        self.wrong = list(wrong)


def reason(error: Exception) -> str:
    """The first line of the error, without urllib's own wrapping."""
    if type(error) is urllib.error.URLError:
        error = error.reason
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
