"""Writes a file or a folder so that no crash leaves a partial one under its name."""

import contextlib
import glob
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator


class OutputError(ValueError):
    """There is something already where a result should be written to."""


def check_free(
    path: str | os.PathLike,
    overwrite: bool = False,
    *,
    kind: str = "file",
    is_kind: Callable[[pathlib.Path], bool] = pathlib.Path.is_file,
    error: type[ValueError] = OutputError,
) -> None:
    """Raises `error` unless a result may be written to `path`: nothing there is lost unasked.

    Args:
      path: Where the result goes.
      overwrite: Whether an earlier one there may be replaced.
      kind: What the result is.
      is_kind: Whether what is there is such a thing; nothing else is ever replaced.
      error: What is raised.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return
    if not is_kind(path):
        raise error(f"{path} is there and is no {kind}: choose another name.")
    if not overwrite:
        raise error(f"{path} exists; --overwrite (in Python: overwrite=True) replaces it.")


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Gives a path beside `path` to write to, which takes its place at the end of the block.

    If the block raises, what was there stays and what was written is removed. A folder cannot be
    replaced in one step: between two renames there is none under that name. Missing folders above
    `path` are created.

    Args:
      path: The file or folder to be written; its ending stays that of the path to write to.

    Raises:
      OutputError: There is a folder where a file was written, or a file where a folder was.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial-{os.getpid()}{path.suffix}")
    _remove(partial)  # A process of the same number may have been killed.
    try:
        yield partial
        if path.exists() and path.is_dir() != partial.is_dir():
            there, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
            raise OutputError(f"{path} is a {there}, not a {wanted}: choose another name.")
        if path.is_dir():
            old = path.with_name(f".{path.name}.old-{os.getpid()}")
            os.rename(path, old)
            os.rename(partial, path)
            shutil.rmtree(old)
        else:
            os.replace(partial, path)
    finally:
        _remove(partial)


def is_left_over(path: pathlib.Path) -> bool:
    """Whether a path has the name of a partial file or folder, which a killed process has left."""
    return re.fullmatch(r"\..+\.partial-\d+(\.[^.]*)?", path.name) is not None


def remove_left_overs(path: str | os.PathLike) -> None:
    """Removes what killed processes have left of `path`; none may be writing it."""
    path = pathlib.Path(path)
    stem, ending = glob.escape(path.stem), glob.escape(path.suffix)
    for left_over in path.parent.glob(f".{stem}.partial-*{ending}"):
        if is_left_over(left_over):
            _remove(left_over)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
