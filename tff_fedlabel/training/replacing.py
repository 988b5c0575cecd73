"""Writes a file or a folder so that no crash leaves a partial one under its name."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Gives a path beside `path` to write to, which takes its place at the end of the block.

    If the block raises, what was there stays and what was written is removed. A folder cannot be
    replaced in one step: between two renames there is none under that name. Missing folders above
    `path` are created.

    Args:
      path: The file or folder to be written; its ending stays that of the path to write to.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial-{os.getpid()}{path.suffix}")
    _remove(partial)  # A process of the same number may have been killed.
    try:
        yield partial
        if path.is_dir():
            old = path.with_name(f".{path.name}.old-{os.getpid()}")
            os.rename(path, old)
            os.rename(partial, path)
            shutil.rmtree(old)
        else:
            os.replace(partial, path)
    finally:
        _remove(partial)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
