"""Keeps images that were read once as an array on disk, which later runs map into memory."""

import contextlib
import hashlib
import os
import pathlib
import re
from collections.abc import Iterable, Iterator

import numpy as np

from tff_fedlabel._replacing import is_left_over, replacing
from tff_fedlabel.datasets import _download_lock
from tff_fedlabel.datasets._source_errors import DataNotFoundError

_FORMAT = "1"  # To be changed with what is written for the same images.


def default_folder() -> pathlib.Path:
    """`~/.cache/tff_fedlabel`, or in `$XDG_CACHE_HOME`."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(root).expanduser() / "tff_fedlabel"


class ImageCache:
    """The array of one data set's images in one size.

    Args:
      folder: where the array lies; None is `default_folder()`.
      path: where the data comes from. A new array takes the place of older ones of the same path.
      image_size: the side of the images, None if they keep theirs.
      key: what the pixels depend on, as text: files with sizes and times of their last change.
    """

    def __init__(self, folder: str | None, path: str, image_size: int | None, key: Iterable[str]):
        self._folder = pathlib.Path(folder).expanduser() if folder else default_folder()
        # A file name of at most 255 bytes, without what `glob` reads as a pattern.
        stem = re.sub(r"[^\w.-]", "_", pathlib.Path(path).name)[:40]
        self._family = f"own-{stem}-{_digest([path, str(image_size)])[:8]}"
        self._file = f"{self._family}-{_digest([_FORMAT, *key])[:24]}.npy"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process writes the array of this path and size: it waits for this one.

        Raises:
          DataNotFoundError: the folder is not writable.
        """
        with self._told():
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = self._folder / f"{self._family}.lock"
            with _download_lock.one_at_a_time(lock, self._file) as alone:
                if alone:  # Also what a killed process left of the data as it was then.
                    for left_over in self._folder.glob(f".{self._family}-*"):
                        if is_left_over(left_over):
                            left_over.unlink(missing_ok=True)
                yield

    def open(self) -> np.ndarray | None:
        """uint8 [n, h, w, c], mapped into memory and not writable; None if it is not there.

        Raises:
          DataNotFoundError: the file cannot be read.
        """
        if not (self._folder / self._file).exists():
            return None
        try:
            with self._told():
                mapped = np.load(self._folder / self._file, mmap_mode="r")
        except (ValueError, EOFError):  # Cut off by a crash of the machine.
            return None
        if not isinstance(mapped, np.memmap) or mapped.dtype != np.uint8 or mapped.ndim != 4:
            return None  # Something else under that name.
        # A plain array: indexing a memmap gives memmaps, which are slower and no better.
        return np.asarray(mapped)

    def write(self, shape: tuple[int, ...], blocks: Iterable[np.ndarray]) -> np.ndarray:
        """Writes uint8 blocks [m, h, w, c] one after the other, then opens what was written.

        Args:
          shape: (n, h, w, c) of all blocks together.
          blocks: made as they are written, so that they are never in memory at once.

        Raises:
          DataNotFoundError: the folder is not writable, or the disk is full.
        """
        with self._told():
            with replacing(self._folder / self._file) as partial, open(partial, "wb") as file:
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                for block in blocks:
                    file.write(np.ascontiguousarray(block, np.uint8).data)
                file.flush()
                os.fsync(file.fileno())
            for older in self._folder.glob(f"{self._family}-*.npy"):
                if older.name != self._file:
                    older.unlink(missing_ok=True)  # Whoever has it mapped keeps it.
        return self.open()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except DataNotFoundError:
            raise
        except OSError as error:
            raise DataNotFoundError(
                f"images that were read cannot be kept in {self._folder} "
                f"({error.strerror or error}); name another folder as data_dir (--data_dir)."
            ) from error


def _digest(texts: Iterable[str]) -> str:
    result = hashlib.sha256()
    for text in texts:
        result.update(text.encode(errors="surrogateescape"))
        result.update(b"\0")
    return result.hexdigest()
