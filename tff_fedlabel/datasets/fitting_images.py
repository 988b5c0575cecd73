"""Images of any size and kind as uint8 arrays of the shape that a model takes."""

import os
import pathlib
from typing import NamedTuple

import numpy as np
import PIL.Image

from tff_fedlabel.datasets import _image_files


class Fitted(NamedTuple):
    """An image in the shape that a model takes.

    Attributes:
      pixels: uint8 [height, width, channels].
      resized: Whether the image had another height or width.
      recolored: Whether it was grey and is in colours now, or the reverse.
    """

    pixels: np.ndarray
    resized: bool
    recolored: bool


class UnreadableImageError(ValueError):
    """A file is not an image that can be read; the message says why."""


def find(folder: str | os.PathLike) -> list[pathlib.Path]:
    """All PNG and JPEG files of a folder and the folders in it, by name, hidden ones left out."""
    folder = pathlib.Path(folder)
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in _image_files.SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )


def read(path: str | os.PathLike, shape: tuple[int, int, int]) -> Fitted:
    """Reads a PNG or JPEG in a shape, in the way in which one's own images are read for training.

    Args:
      path: The file.
      shape: (height, width, channels) with 1 channel (grey) or 3 (RGB).

    Raises:
      UnreadableImageError: It is damaged, no image, or cannot be opened.
    """
    header = _image_files.read_header(str(path))
    try:
        if isinstance(header, Exception):
            raise header
        pixels = _image_files.read_pixels(str(path), shape)
    except Exception as error:  # Pillow raises whatever its decoders do.
        raise UnreadableImageError(_image_files.why_unreadable(error)[:80]) from error
    size, mode = header
    return Fitted(pixels, size != shape[:2], (mode in _image_files.GREY) != (shape[2] == 1))


def fit(pixels: np.ndarray, shape: tuple[int, int, int]) -> Fitted:
    """An image uint8 [h, w], [h, w, 1] or [h, w, 3] in a shape, as `read` makes it."""
    grey = pixels.ndim == 2 or pixels.shape[2] == 1
    image = PIL.Image.fromarray(pixels.reshape(pixels.shape[:2]) if grey else pixels)
    image = _image_files.resized(image.convert("L" if shape[2] == 1 else "RGB"), shape[:2])
    recolored = grey != (shape[2] == 1)
    return Fitted(np.asarray(image).reshape(shape), tuple(pixels.shape[:2]) != shape[:2], recolored)
