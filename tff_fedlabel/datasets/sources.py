"""Data sets by name, as uint8 images in memory.

    source = load("fashion_mnist", data_dir="~/tensorflow_datasets")
    source.train.x   # uint8 [n, 28, 28, 1]

Files already on disk are read without touching the network.
"""

import dataclasses
import os

import numpy as np

from tff_fedlabel._validation import (
    check_flag,
    check_int,
    check_name,
    check_seed,
    check_type,
    nearest,
)
from tff_fedlabel.datasets import _medmnist, _splits, _tfds
from tff_fedlabel.datasets._fingerprint import Fingerprint
from tff_fedlabel.datasets._published import Published
from tff_fedlabel.datasets._source_errors import (
    CorruptDataError,
    DataNotFoundError,
    UnusableFilesError,
)

__all__ = [
    "IMAGE_SIZES",
    "NAMES",
    "SPLITS",
    "CorruptDataError",
    "DataNotFoundError",
    "Examples",
    "Source",
    "UnusableFilesError",
    "load",
]

SPLITS = ("pooled", "official")
# Name -> available image sizes (height and width in pixels), the default first.
IMAGE_SIZES: dict[str, tuple[int, ...]] = {
    "digits": (8,),
    **{name: (dataset.image_size,) for name, dataset in _tfds.DATASETS.items()},
    **{name: _medmnist.IMAGE_SIZES for name in _medmnist.NAMES},
}
NAMES = tuple(IMAGE_SIZES)


@dataclasses.dataclass(frozen=True)
class Examples:
    """Images with their labels.

    Attributes:
      x: uint8 [n, height, width, channels], values 0..255; of one's own data, rows of an array on
        disk that are copied when they are asked for (`x[start:stop]`, `np.asarray(x)`).
      y: int32 [n], values 0..num_classes - 1.
    """

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set split into training, validation and test images.

    Attributes:
      name: the name given to `load`.
      train: what is partitioned across clients.
      validation: for choosing hyper-parameters.
      test: for the reported results.
      num_classes: number of classes, N.
      label_names: N names, in the order of the labels.
      has_own_clients: whether the data itself says who holds which image.
      note: one line for the user on what was read and made, if that is worth a line.
    """

    name: str
    train: Examples
    validation: Examples
    test: Examples
    num_classes: int
    label_names: tuple[str, ...]
    has_own_clients: bool = False
    note: str = ""

    def fingerprint(self) -> str:
        """64 hexadecimal digits (SHA-256) that change when any image or label does.

        It covers dtype, shape and values of images and labels, the split into training, validation
        and test, and the number of classes, but not names. It is the same in every process and on
        every machine.
        """
        result = Fingerprint("Source")
        result.add_text(str(self.num_classes))
        for examples in (self.train, self.validation, self.test):
            result.add_array(examples.x)
            result.add_array(examples.y)
        return result.hex()


def load(
    name: str,
    data_dir: str | None = None,
    split: str = "pooled",
    seed: int = 0,
    download: bool = True,
    *,
    image_size: int | None = None,
) -> Source:
    """Reads a data set into memory, once, as uint8.

    Processes that fetch the same data wait for each other.

    Args:
      name: one of `NAMES`.
      data_dir: the folder that holds `<name>/<version>/` as tensorflow-datasets prepares it, or
        `<name>.npz` as MedMNIST publishes it. Default: tensorflow-datasets' own
        (`$TFDS_DATA_DIR` or `~/tensorflow_datasets`) and `~/.medmnist`. `digits` needs none.
      split: "pooled" merges all published splits, then divides them 80/5/15 into train, validation
        and test by `seed` (the paper's appendix). "official" keeps the published test set, and the
        published validation set or else 5% of the training images, chosen by `seed`.
      seed: decides which images go where; in [0, 2**31).
      download: fetch the data when it is not on disk. False never touches the network.
      image_size: height and width in pixels, one of `IMAGE_SIZES[name]`; default: the first of
        them. MedMNIST publishes a file for each (`<name>_64.npz`); at 224 pixels all images take
        2.6 GB (bloodmnist) and 2.9 GB (organamnist) of memory.

    Returns:
      The `Source`. The same arguments give the same images in the same order.

    Raises:
      ValueError: unknown `name`, `split` or `image_size`, `seed` out of range, or "official" for a
        data set that has no published test set. `WrongTypeError`, which is a ValueError too, if a
        type is wrong.
      DataNotFoundError: not on disk, and not allowed or not possible to download.
      CorruptDataError: files are damaged or incomplete.
    """
    check_type("name", name, str, "the name of a data set, such as 'digits'")
    if name not in NAMES:
        hint = nearest(name.lower(), NAMES)
        raise ValueError(f"name {name!r} is unknown{hint}; choose from: {', '.join(NAMES)}.")
    if data_dir is not None:
        check_type("data_dir", data_dir, (str, os.PathLike), "None or the path of a folder")
    check_name("split", split, SPLITS)
    seed = check_seed(seed)
    download = check_flag("download", download)
    image_size = _check_image_size(name, image_size)
    published = _open(name, data_dir, download, image_size)
    order, sizes = _splits.split_rows(name, published.sizes, split, seed)
    x, y = _read_in_order(name, published, order)
    parts, start = [], 0
    for size in sizes:
        parts.append(Examples(x[start : start + size], y[start : start + size]))
        start += size
    return Source(name, *parts, len(published.label_names), published.label_names)


def _check_image_size(name: str, image_size: int | None) -> int:
    known = IMAGE_SIZES[name]
    if image_size is None:
        return known[0]
    image_size = check_int("image_size", image_size)
    if image_size not in known:
        sizes = " or ".join(map(str, known))
        raise ValueError(f"image_size must be {sizes} for {name}, got {image_size}.")
    return image_size


def _read_in_order(name, published: Published, order):
    """All images and labels, each written straight to its final row, so no second copy exists."""
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    x = np.empty((len(order), *published.image_shape), np.uint8)
    y = np.empty(len(order), np.int32)
    num_classes = len(published.label_names)
    start = 0
    for split, size in published.sizes.items():
        filled = 0
        for images, labels in published.read(split):
            if filled + len(labels) > size:
                raise CorruptDataError(f"{name}: split {split!r} holds more than {size} images")
            if len(labels) and not (0 <= labels.min() and labels.max() < num_classes):
                raise CorruptDataError(
                    f"{name}: split {split!r} holds a label outside 0..{num_classes - 1}"
                )
            rows = position[start + filled : start + filled + len(labels)]
            x[rows] = images
            y[rows] = labels
            filled += len(labels)
        if filled != size:
            raise CorruptDataError(f"{name}: split {split!r} holds {filled} images, not {size}")
        start += size
    return x, y


def _open(name: str, data_dir: str | None, download: bool, image_size: int) -> Published:
    if name in _medmnist.NAMES:
        return _medmnist.open_npz(name, image_size, data_dir, download)
    if name in _tfds.DATASETS:
        return _tfds.open_prepared(name, data_dir, download)
    return _open_digits()


def _open_digits() -> Published:
    # scikit-learn ships with the images.
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.rint(data.images[..., np.newaxis] * (255.0 / 16.0)).astype(np.uint8)
    names = tuple(str(digit) for digit in range(10))
    batches = (images, data.target)
    return Published({"train": len(images)}, images.shape[1:], names, lambda _: iter([batches]))
