"""Some images of a large array, copied only when they are asked for."""

import numpy as np


class ImageRows:
    """The rows `rows` of `images`, in that order, read like an array.

    For arrays on disk (`np.load(..., mmap_mode="r")`), of which a copy would not fit in memory.

    Args:
      images: array `[n, ...]`.
      rows: row numbers, integers `[m]`.
    """

    def __init__(self, images: np.ndarray, rows: np.ndarray):
        self._images, self.rows = images, np.asarray(rows, np.int64)
        self.shape = (len(self.rows), *images.shape[1:])
        self.dtype, self.ndim = images.dtype, images.ndim

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index) -> np.ndarray:
        """A copy of the rows at `index`: a number, a slice, or an array of numbers or flags."""
        return self._images[self.rows[index]]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """All rows in memory, for whoever needs an array."""
        return np.asarray(self[:], dtype)

    def __repr__(self) -> str:
        return f"ImageRows({self.dtype} {list(self.shape)})"
