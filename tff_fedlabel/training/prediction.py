"""Classifies images with the model of a run: a folder of files, or the arrays of an `.npz`."""

import dataclasses
import os
import pathlib
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from tff_fedlabel._replacing import check_free, replacing
from tff_fedlabel.datasets import fitting_images
from tff_fedlabel.training import evaluation
from tff_fedlabel.training.trained_model import TrainedModel

_UNKNOWN = -1
# What NumPy raises for a damaged file; the last two for one that holds a single array.
_DAMAGE = (
    *(OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError),
    *(TypeError, AttributeError),
)
_PICTURE = "confusion.png"


class ImagesError(ValueError):
    """There are no images where they should be, or they have no usable form."""


@dataclasses.dataclass
class Images:
    """Images to be classified; made by `find_images`.

    Attributes:
      key: What `names` are: "file" or "row".
      names: Files, relative to their folder, or row numbers.
      labels: int [n], class numbers, -1 where the class is not known.
      folder: The folder of the files, None for rows.
      x: uint8 [n, h, w, c] or [n, h, w], None for files.
    """

    key: str
    names: list[str]
    labels: np.ndarray
    folder: pathlib.Path | None = None
    x: np.ndarray | None = None

    def read(self, index: int, shape: tuple[int, int, int]) -> fitting_images.Fitted:
        """One image in the shape of the model; `UnreadableImageError` if that fails."""
        if self.folder is not None:
            return fitting_images.read(self.folder / self.names[index], shape)
        return fitting_images.fit(self.x[index], shape)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a model says of images.

    Attributes:
      key: "file" or "row".
      names: Those that could be read, [n].
      probabilities: float32 [n, classes].
      labels: int [n], -1 where the class is not known.
      class_names: The names of the classes.
      unreadable: (name, reason) of the others.
      resized: How many had another size than the model's.
      recolored: How many were grey and became coloured, or the reverse.
    """

    key: str
    names: list[str]
    probabilities: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    unreadable: list[tuple[str, str]]
    resized: int
    recolored: int

    @property
    def classes(self) -> np.ndarray:
        """int [n], the most probable class of each image."""
        return self.probabilities.argmax(1)

    @property
    def known(self) -> np.ndarray:
        """bool [n], whether the class is known."""
        return self.labels != _UNKNOWN

    def accuracy(self) -> float:
        """Share of the images with a known class that are given it; NaN without any."""
        known = self.known
        right = self.classes[known] == self.labels[known]
        return float(right.mean()) if known.any() else float("nan")

    def confusion(self) -> np.ndarray:
        """int64 [classes, classes]: images by true class and predicted class."""
        counts = np.zeros([len(self.class_names)] * 2, np.int64)
        np.add.at(counts, (self.labels[self.known], self.classes[self.known]), 1)
        return counts

    def table(self, all_classes: bool = False) -> pd.DataFrame:
        """One row for each image: file or row, class, probability, label if any is known.

        Args:
          all_classes: Whether a column `p_<class>` for each class follows.
        """
        names = np.array(self.class_names, object)
        columns: dict[str, Any] = {
            # As objects: the names of files may be any bytes, which no text of pandas' can hold.
            self.key: pd.Series(self.names, dtype=object),
            "class": names[self.classes],
            "probability": self.probabilities.max(1).round(6),
        }
        if self.known.any():
            columns["label"] = [names[y] if y != _UNKNOWN else "" for y in self.labels]
        table = pd.DataFrame(columns)
        if all_classes:
            every = [f"p_{name}" for name in self.class_names]
            probabilities = pd.DataFrame(self.probabilities.round(6), columns=every)
            table = pd.concat([table, probabilities], axis=1)
        return table

    def write(
        self, output: str | os.PathLike, all_classes: bool = False, *, overwrite: bool = False
    ) -> pathlib.Path | None:
        """Writes the table, and confusion.png beside it if classes are known.

        Args:
          output: The CSV file.
          all_classes: See `table`.
          overwrite: Whether an earlier table there, and a confusion.png beside it, may be replaced;
            the picture is removed if there is no new one.

        Returns:
          The path of the picture, None without one.

        Raises:
          ValueError: See `check_output`.
        """
        output, path = check_output(output, overwrite)
        with replacing(output) as partial:
            self.table(all_classes).to_csv(
                partial, index=False, float_format="%.6f", errors="surrogateescape"
            )
        if not self.known.any():
            path.unlink(missing_ok=True)
            return None
        from tff_fedlabel.training import pictures

        title = f"accuracy {self.accuracy():.1%} on {np.count_nonzero(self.known)} images"
        pictures.save(pictures.confusion(self.confusion(), self.class_names, title), path)
        return path


def check_output(
    output: str | os.PathLike, overwrite: bool = False
) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the paths of a table, and of the picture beside it, that may be written.

    Raises:
      ValueError: One of them is there and `overwrite` is False, or it is a folder, or the table
        has the name of the picture.
    """
    output = pathlib.Path(output)
    if output.name == _PICTURE:
        raise ValueError(f"{output} is where the picture goes; give the table another name.")
    paths = output, output.with_name(_PICTURE)
    for path in paths:
        check_free(path, overwrite)
    return paths


def find_images(path: str | os.PathLike, class_names: tuple[str, ...]) -> Images:
    """Finds the images in a folder, an image file or an `.npz`, without reading a folder's.

    The class of a file is known if the folder that it lies in is called like a class; that of a row
    if the `.npz` holds a `y` that is not -1, or is the name of a class, there.

    Args:
      path: A folder of PNG and JPEG files, searched with the folders in it; one such file; or an
        `.npz` with `x`, uint8 [n, h, w], [n, h, w, 1] or [n, h, w, 3], and perhaps `y` [n],
        class numbers or names.
      class_names: The names of the classes.

    Raises:
      ImagesError: There are none, or the arrays have another form.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise ImagesError(f"{path} does not exist: give a folder of PNG or JPEG, or an .npz.")
    if path.suffix == ".npz":
        return _rows(path, class_names)
    if path.is_dir():
        folder, files = path, fitting_images.find(path)
    else:
        folder, files = path.parent, [path] if path.is_file() else []
    if not files:
        raise ImagesError(f"{path} holds no images: give a folder of PNG or JPEG, or an .npz.")
    numbers = {name: number for number, name in enumerate(class_names)}
    labels = [numbers.get(file.absolute().parent.name, _UNKNOWN) for file in files]
    names = [file.relative_to(folder).as_posix() for file in files]
    return Images("file", names, np.array(labels), folder=folder)


def _rows(path: pathlib.Path, class_names: tuple[str, ...]) -> Images:
    num_classes = len(class_names)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x = arrays["x"]
            y = arrays["y"] if "y" in arrays else None
    except KeyError:
        raise ImagesError(f"{path} holds no array x.") from None
    except _DAMAGE as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ImagesError(f"{path} cannot be read ({reason}).") from error
    if x.dtype != np.uint8:
        raise ImagesError(
            f"x in {path} is {x.dtype}, not uint8: for pixels in [0, 1], store "
            "(255 * x).round().astype('uint8')."
        )
    if x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3)) or not x.size:
        raise ImagesError(
            f"x in {path} has the shape {list(x.shape)}, not [n, h, w], [n, h, w, 1] or "
            "[n, h, w, 3]."
        )
    labels = np.full(len(x), _UNKNOWN)
    if y is not None:
        labels = np.squeeze(y, -1) if y.ndim == 2 and y.shape[1] == 1 else y
        if labels.dtype.kind == "U":  # Names, as data to train on may have them.
            numbers = {name: number for number, name in enumerate(class_names)}
            known = [numbers.get(str(name), _UNKNOWN) for name in labels.ravel()]
            labels = np.array(known, int).reshape(labels.shape)
        if labels.shape != (len(x),) or labels.dtype.kind not in "iu":
            raise ImagesError(
                f"y in {path} is {y.dtype} {list(y.shape)}, not one whole number for each of the "
                f"{len(x)} images."
            )
        if not (labels.min() >= _UNKNOWN and labels.max() < num_classes):
            raise ImagesError(
                f"y in {path} holds {labels.min()} to {labels.max()}, but the model has the "
                f"classes 0 to {num_classes - 1} (-1: not known)."
            )
    names = [str(row) for row in range(len(x))]
    return Images("row", names, labels.astype(np.int64), x=x)


def predict(model: TrainedModel, images: Images) -> Prediction:
    """Classifies images; those that cannot be read are left out and named.

    Args:
      model: What `load_model` returned.
      images: What `find_images` returned. They are read batch by batch.
    """
    unreadable, read, changes = [], [], []

    def fitted() -> Iterator[np.ndarray]:
        for index, name in enumerate(images.names):
            try:
                one = images.read(index, model.image_shape)
            except fitting_images.UnreadableImageError as error:
                unreadable.append((name, str(error)))
                continue
            read.append(index)
            changes.append((one.resized, one.recolored))
            yield one.pixels

    batches = evaluation.batches_of_images(fitted())
    logits = [*evaluation.logits_of(model.functional, model.weights, batches)]
    logits = np.concatenate([np.zeros([0, len(model.class_names)], np.float32), *logits])
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    resized, recolored = np.sum(np.array(changes, int).reshape(-1, 2), axis=0)
    return Prediction(
        images.key,
        [images.names[index] for index in read],
        exponentials / exponentials.sum(axis=1, keepdims=True),
        images.labels[read],
        model.class_names,
        unreadable,
        int(resized),
        int(recolored),
    )
