"""Reads data sets in tensorflow-datasets' prepared form (TFRecord shards and two JSON files)."""

import dataclasses
import logging
import os
import pathlib
import re
import string
import urllib.error
import urllib.request

import numpy as np

from tff_fedlabel.datasets import _download_lock
from tff_fedlabel.datasets._published import Batches, Published
from tff_fedlabel.datasets._source_errors import CorruptDataError, DataNotFoundError, reason

_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class _Dataset:
    """What this package knows about one tensorflow-datasets entry.

    Attributes:
      builder: its name there, which is also its folder under `data_dir`.
      version: the version the pinned release prepares; only shown to the user.
      num_classes: number of classes.
      image_size: height and width of the images.
      url: where it is downloaded from; probed first so that a missing network is reported at
        once instead of after minutes of retries.
      label_names: names for entries whose prepared form may lack them.
      transposed: whether rows and columns are swapped in the stored images.
    """

    builder: str
    version: str
    num_classes: int
    image_size: int
    url: str
    label_names: tuple[str, ...] | None = None
    transposed: bool = False


DATASETS = {
    "emnist": _Dataset(
        "emnist/byclass",
        "3.1.0",
        62,
        28,
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
        transposed=True,
    ),
    "cifar10": _Dataset(
        "cifar10",
        "3.0.2",
        10,
        32,
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        tuple("airplane automobile bird cat deer dog frog horse ship truck".split()),
    ),
    "cifar100": _Dataset(
        "cifar100", "3.0.2", 100, 32, "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
    ),
    "fashion_mnist": _Dataset(
        "fashion_mnist",
        "3.0.1",
        10,
        28,
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/train-labels-idx1-ubyte.gz",
    ),
}


def open_prepared(name: str, data_dir: str | None, download: bool) -> Published:
    """Opens one of `DATASETS`; see `sources.load` for arguments and errors."""
    dataset = DATASETS[name]
    root = pathlib.Path(
        data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    ).expanduser()
    folder = _find_folder(root, dataset)
    if folder is None and download:
        _download(name, dataset, root)
        folder = _find_folder(root, dataset)
    if folder is None:
        raise DataNotFoundError(_where_to_put(name, dataset, root, "is not on disk"))
    return _open_folder(name, dataset, folder)


def _find_folder(root: pathlib.Path, dataset: _Dataset) -> pathlib.Path | None:
    """The folder of the newest prepared version, or None."""
    versions = {}
    parent = root / dataset.builder
    if parent.is_dir():
        for path in parent.iterdir():
            # Not "3.0.2.incompleteXYZ", which an interrupted download leaves behind.
            if path.is_dir() and re.fullmatch(r"\d+\.\d+\.\d+", path.name):
                versions[tuple(map(int, path.name.split(".")))] = path
    return versions[max(versions)] if versions else None


def _where_to_put(name, dataset, root, what) -> str:
    return (
        f"{name} {what}: put the folder that tensorflow-datasets prepares for "
        f"{dataset.builder!r} (dataset_info.json, features.json, *.tfrecord-*) at "
        f"{root / dataset.builder / dataset.version}, or set data_dir to the folder that holds "
        f"{dataset.builder}/{dataset.version}"
    )


def _download(name, dataset, root) -> None:
    """Has tensorflow-datasets prepare it, unless another process does so meanwhile."""
    lock = root / f"{dataset.builder.replace('/', '_')}.lock"
    try:
        _probe(dataset.url)
        root.mkdir(parents=True, exist_ok=True)
        with _download_lock.one_at_a_time(lock, name):
            if _find_folder(root, dataset) is None:
                tfds = _import_tfds()
                builder = tfds.builder(dataset.builder, data_dir=str(root), try_gcs=False)
                builder.download_and_prepare()
    except Exception as error:  # tensorflow-datasets passes on whatever its downloader raises.
        message = _where_to_put(name, dataset, root, f"could not be downloaded ({reason(error)})")
        raise DataNotFoundError(message) from error


def _probe(url: str) -> None:
    """Raises OSError when `url`'s host does not answer; any HTTP status counts as an answer."""
    request = urllib.request.Request(url, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=20).close()
    except urllib.error.HTTPError:
        pass


def _import_tfds():
    """tensorflow-datasets, imported late (it is slow) and with its log limited to warnings."""
    import tensorflow_datasets as tfds

    logging.getLogger("absl").addFilter(_drop_tfds_info)
    return tfds


def _drop_tfds_info(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or "tensorflow_datasets" not in record.pathname


def _open_folder(name: str, dataset: _Dataset, folder: pathlib.Path) -> Published:
    for file in ("dataset_info.json", "features.json"):
        if not (folder / file).is_file():
            raise _corrupt(name, folder, f"{file} is missing")
    tfds = _import_tfds()
    try:
        # From the files alone: the named builder would fetch its description from Google's servers.
        builder = tfds.builder_from_directory(str(folder))
        sizes = {key: int(builder.info.splits[key].num_examples) for key in builder.info.splits}
        image_shape = tuple(builder.info.features["image"].shape)
        label = builder.info.features["label"]
        num_classes = label.num_classes
        names = getattr(label, "names", None)
    except Exception as error:  # JSON, proto and key errors alike: the description is unreadable.
        raise _corrupt(
            name, folder, f"its description cannot be read ({_first_line(error)})"
        ) from error
    for split in ("train", "test"):
        if not sizes.get(split):
            raise _corrupt(name, folder, f"dataset_info.json has no images in split {split!r}")
    if num_classes != dataset.num_classes:
        raise _corrupt(
            name, folder, f"features.json has {num_classes} classes, not {dataset.num_classes}"
        )
    if len(image_shape) != 3 or None in image_shape:
        raise _corrupt(name, folder, f"features.json has images of shape {image_shape}")
    if dataset.label_names:
        names = dataset.label_names
    elif not names or len(names) != num_classes:
        names = map(str, range(num_classes))
    if dataset.transposed:
        image_shape = (image_shape[1], image_shape[0], image_shape[2])

    def read(split: str) -> Batches:
        return _read_split(name, dataset, folder, builder, split)

    wanted = {key: sizes[key] for key in ("train", "validation", "test") if sizes.get(key)}
    return Published(wanted, image_shape, tuple(names), read)


def _read_split(name, dataset, folder, builder, split) -> Batches:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    shape = builder.info.features["image"].shape

    def decode(example):
        image = tf.io.decode_image(example["image"], channels=shape[-1], expand_animations=False)
        # Checked one by one: batching trusts the declared shape and would copy past the end.
        return tf.ensure_shape(image, shape), example["label"]

    try:
        data = builder.as_dataset(
            split=split,
            shuffle_files=False,
            decoders={"image": tfds.decode.SkipDecoding()},
            # The images are kept by the caller; a second copy inside tf.data would double them.
            read_config=tfds.ReadConfig(try_autocache=False),
        )
        for images, labels in data.map(decode, tf.data.AUTOTUNE).batch(_BATCH).as_numpy_iterator():
            yield np.swapaxes(images, 1, 2) if dataset.transposed else images, labels
    except (tf.errors.OpError, OSError, AssertionError, ValueError) as error:
        raise _corrupt(
            name, folder, f"split {split!r} cannot be read ({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    text = getattr(error, "message", None) or str(error) or type(error).__name__
    # TensorFlow prefixes the failing node, which tells the user nothing.
    return re.sub(r"^\{\{.*?\}\}\s*", "", text.strip().splitlines()[0])


def _corrupt(name, folder, what) -> CorruptDataError:
    return CorruptDataError(
        f"{name}: {folder} is damaged: {what}; delete that folder and download it again"
    )
