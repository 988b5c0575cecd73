"""A fingerprint of data, which changes when any of the data changes."""

import hashlib

import numpy as np

_CHUNK_BYTES = 1 << 24


class Fingerprint:
    """Hashes arrays and texts in the order in which they are added.

    The same on every machine: numbers are hashed in little-endian byte order, and each part is
    delimited by its own dtype and shape.
    """

    def __init__(self, kind: str):
        self._digest = hashlib.sha256()
        self.add_text(kind)

    def add_text(self, text: str) -> None:
        content = text.encode()
        self._digest.update(b"text %d\n" % len(content))
        self._digest.update(content)

    def add_array(self, array: np.ndarray) -> None:
        """Adds dtype, shape and values; in chunks, so that nothing large is copied."""
        little = array.dtype.newbyteorder("<")
        shape = " ".join(map(str, array.shape))
        self._digest.update(f"array {little.str} [{shape}]\n".encode())
        row_bytes = max(array[:1].nbytes, 1)
        step = max(_CHUNK_BYTES // row_bytes, 1)
        for start in range(0, len(array), step):
            chunk = np.ascontiguousarray(array[start : start + step], little)
            self._digest.update(chunk.data if chunk.size else b"")

    def hex(self) -> str:
        """64 hexadecimal digits (SHA-256)."""
        return self._digest.hexdigest()
