"""Reads PNG and JPEG files of one's own, in several threads, into one array on disk."""

import concurrent.futures
import os
import pathlib
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import tqdm

from tff_fedlabel._validation import check_int
from tff_fedlabel.datasets._image_cache import ImageCache
from tff_fedlabel.datasets._listing import ImageSizes
from tff_fedlabel.datasets._source_errors import UnusableFilesError

SUFFIXES = (".png", ".jpg", ".jpeg")
MIN_SIDE, MAX_SIDE = 8, 256  # What the models of this package take.
_FORMATS = ("PNG", "JPEG")
GREY = ("1", "L", "LA", "I", "I;16", "I;16B")
_ORIENTATION = 0x0112  # EXIF; 5 to 8 are turned by 90 degrees.
_BLOCK = 256  # Images between two writes.


class ImageFiles:
    """The pixels of image files; see `_listing.Images`.

    Grey images have one channel if all are grey, and three otherwise. Transparency is dropped,
    16 bits become 8, and photos are turned as their EXIF data says.

    Args:
      folder: what the files lie in.
      files: their paths, in the order of the rows.
    """

    def __init__(self, folder: pathlib.Path, files: Sequence[str]):
        self._folder, self._files = str(folder), files

    def read(
        self, image_size: int | None, folder: str | None
    ) -> tuple[np.ndarray, ImageSizes | None]:
        """Reads the images, or opens what was read before (then the sizes are None).

        Raises:
          ValueError: `image_size` is out of range; or it is None and the images differ in size, or
            are too small or too large.
          UnusableFilesError: files cannot be read as images.
          DataNotFoundError: the images cannot be kept in the folder.
        """
        image_size = check_image_size(image_size)
        cache = ImageCache(folder, self._folder, image_size, self._keys())
        images = cache.open()
        if images is not None:
            return images, None
        with cache.locked():
            images = cache.open()  # Another process may have read them meanwhile.
            if images is not None:
                return images, None
            return self._read(image_size, cache)

    def _keys(self) -> Iterator[str]:
        wrong = []
        for path in self._files:
            try:
                status = os.stat(path)
            except OSError as error:
                wrong.append((path, error.strerror))
                continue
            if not stat.S_ISREG(status.st_mode):  # To read from a pipe could take for ever.
                wrong.append((path, "it is no regular file"))
                continue
            yield f"{path} {status.st_size} {status.st_mtime_ns}"
        if wrong:
            raise UnusableFilesError(self._folder, wrong)

    def _read(self, image_size, cache) -> tuple[np.ndarray, ImageSizes]:
        wrong: dict[str, str] = {}
        headers = {}
        with concurrent.futures.ThreadPoolExecutor(threads()) as pool:
            for path, header in zip(self._files, pool.map(read_header, self._files), strict=True):
                if isinstance(header, Exception):
                    wrong[path] = why_unreadable(header)
                else:
                    headers[path] = header
            if not headers:
                raise UnusableFilesError(self._folder, list(wrong.items()))
            try:
                size = common_size({size for size, _ in headers.values()}, image_size, self._folder)
            except ValueError:
                if wrong:
                    raise UnusableFilesError(self._folder, list(wrong.items())) from None
                raise
            channels = 1 if all(mode in GREY for _, mode in headers.values()) else 3
            shape = (*size, channels)

            def read_file(path):
                if path in wrong:
                    return np.zeros(shape, np.uint8)
                try:
                    return read_pixels(path, shape)
                except Exception as error:  # Pillow raises whatever its decoders do.
                    wrong[path] = why_unreadable(error)
                    return np.zeros(shape, np.uint8)

            def blocks():
                yield from in_blocks(self._files, read_file, pool, len(self._files))
                if wrong:
                    named = [(path, wrong[path]) for path in self._files if path in wrong]
                    raise UnusableFilesError(self._folder, named)

            images = cache.write((len(self._files), *shape), blocks())
        return images, sizes_of(size for size, _ in headers.values())


def check_image_size(image_size: int | None) -> int | None:
    """Returns a side of images that the models take, or None."""
    if image_size is None:
        return None
    return check_int("image_size", image_size, MIN_SIDE, MAX_SIDE + 1)


def common_size(sizes: set[tuple[int, int]], image_size: int | None, name: str) -> tuple[int, int]:
    """(height, width) that all images get.

    Raises:
      ValueError: `image_size` is None, and the images differ in size or are too small or too large.
    """
    if image_size is not None:
        return image_size, image_size
    if len(sizes) > 1:
        raise ValueError(
            f"the images of {name} are of {len(sizes)} sizes ({sizes_of(sizes)} px); image_size "
            "(--image_size 32, say) resizes them to one."
        )
    (size,) = sizes
    if min(size) < MIN_SIDE or max(size) > MAX_SIDE:
        raise ValueError(
            f"the images of {name} are of {size[0]}x{size[1]} px and the models take {MIN_SIDE} to "
            f"{MAX_SIDE}; image_size (--image_size 32, say) resizes them."
        )
    return size


def sizes_of(sizes: Iterable[tuple[int, int]]) -> ImageSizes:
    """The smallest and the largest of (height, width)."""
    in_order = sorted(set(sizes), key=lambda size: (size[0] * size[1], size))
    return ImageSizes(in_order[0], in_order[-1])


def in_blocks(
    items: Iterable[Any],
    read: Callable[[Any], np.ndarray],
    pool: concurrent.futures.Executor,
    total: int,
) -> Iterator[np.ndarray]:
    """Images [m, h, w, c] that `pool` reads, a block after the other; a bar on a terminal."""
    with tqdm.tqdm(total=total, desc="reading", unit="image", leave=False, disable=None) as bar:
        block = []
        for item in items:
            block.append(item)
            if len(block) == _BLOCK:
                yield np.stack(list(pool.map(read, block)))
                bar.update(len(block))
                block = []
        if block:
            yield np.stack(list(pool.map(read, block)))
            bar.update(len(block))


def threads() -> int:
    """More than there are cores, since files may come from a slow disk."""
    return min(4 * len(os.sched_getaffinity(0)), 32)


def resized(image: PIL.Image.Image, size: tuple[int, int]) -> PIL.Image.Image:
    """The image in (height, width), its sides scaled each for itself."""
    wanted = size[::-1]
    return image if image.size == wanted else image.resize(wanted, PIL.Image.Resampling.BILINEAR)


def read_header(path: str) -> tuple[tuple[int, int], str] | Exception:
    """((height, width) as the image is seen, Pillow's mode), or why it cannot be read."""
    try:
        with PIL.Image.open(path, formats=_FORMATS) as image:
            width, height = image.size
            turned = image.getexif().get(_ORIENTATION, 1) >= 5
            return ((width, height) if turned else (height, width)), image.mode
    except Exception as error:  # Pillow raises whatever its decoders do.
        return error


def read_pixels(path: str, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 [h, w, c]."""
    height, width, channels = shape
    with PIL.Image.open(path, formats=_FORMATS) as opened:
        # Lets JPEG decode a large photo at a half, a quarter or an eighth of its size.
        opened.draft(None, (2 * max(shape), 2 * max(shape)))
        image = PIL.ImageOps.exif_transpose(opened)
    if image.mode.startswith("I"):
        image = PIL.Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if "transparency" in image.info:
        image = image.convert("RGBA")
    image = image.convert("L" if channels == 1 else "RGB")
    return np.asarray(resized(image, (height, width))).reshape(shape)


def why_unreadable(error: Exception) -> str:
    if isinstance(error, PIL.UnidentifiedImageError):
        return "it is no PNG or JPEG image, or damaged"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
