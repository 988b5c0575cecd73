"""Keeps a second command away from a directory of runs."""

import contextlib
import fcntl
import os
import pathlib
import sys
import time
from collections.abc import Iterator

from tff_fedlabel import training

_FILE = ".lock"


@contextlib.contextmanager
def locked(directory: str | os.PathLike, patience: float = 600.0) -> Iterator[int]:
    """Holds the lock of a directory, which is made if needed.

    The runs that are started inside share the lock: where the command was killed but they still
    write their checkpoints, the next command waits for them.

    Args:
      directory: The directory.
      patience: For how many seconds to wait for the runs of a command that was killed.

    Yields:
      The descriptor of the lock, for the processes that share it.

    Raises:
      RunDirectoryError: Another command holds it, or the directory cannot be written to.
    """
    path = pathlib.Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / _FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise training.RunDirectoryError(
            f"cannot write to {path} ({error.strerror}); choose another --output_dir."
        ) from error
    try:
        _acquire(descriptor, path, patience)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: pathlib.Path, patience: float) -> None:
    end, told = time.monotonic() + patience, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = int(os.pread(descriptor, 20, 0) or b"0")
        if _is_alive(holder):
            raise training.RunDirectoryError(
                f"another command (process {holder}) works in {path}; wait for it, or choose "
                "another --output_dir."
            )
        if time.monotonic() > end:
            raise training.RunDirectoryError(
                f"runs of a command that was killed still work in {path}; end them first."
            )
        if not told:
            print(f"waiting for the runs of a killed command in {path}", file=sys.stderr)
            told = True
        time.sleep(0.2)


def _is_alive(process: int) -> bool:
    if not process:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
