"""Lets one process at a time fetch data into a folder."""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
from collections.abc import Iterator

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def one_at_a_time(path: pathlib.Path, name: str) -> Iterator[bool]:
    """Waits until no other process or thread is inside with the same `path`.

    The operating system releases the lock of a process that dies. The file is removed afterwards.

    Args:
      path: the lock file, in a writable folder.
      name: what is fetched, for the message logged while waiting.

    Yields:
      True, or False at once if the file system has no locks.

    Raises:
      OSError: the file cannot be created.
    """
    lock = _acquire(path, name)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            # Still under the lock: whoever waits for this file sees that it is gone.
            path.unlink(missing_ok=True)
            os.close(lock)


def _acquire(path: pathlib.Path, name: str) -> int | None:
    waiting = False
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not waiting and not _try(lock):
                waiting = True
                logging.getLogger(__name__).warning(
                    "%s: waiting for another process that is fetching it", name
                )
            if waiting:
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_at(path, lock):
                return lock
        except OSError as error:
            os.close(lock)
            if error.errno in _NO_LOCKS:
                return None
            raise
        except BaseException:  # Ctrl-C while waiting
            os.close(lock)
            raise
        os.close(lock)


def _try(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: pathlib.Path, lock: int) -> bool:
    """Whether the open file is still the one at `path`, not one that its holder removed."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock))
    except FileNotFoundError:
        return False
