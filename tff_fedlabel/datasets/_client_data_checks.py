"""Rejects client data that cannot be trained on, before training starts."""

from collections.abc import Callable

import numpy as np

from tff_fedlabel._validation import WrongTypeError

# More classes than any data set of images has; labels beyond are dates, ids or the like, and a name
# for each smaller number would fill the memory.
MOST_CLASSES = 2**16
_CHUNK = 8192


class ClientDataError(ValueError):
    """A client's data is unusable.

    Attributes:
      client_id: the client at fault, or None if the whole argument is at fault.
      field: "x", "y", "client_ids", "labeled" or "hidden_y".
    """

    def __init__(self, client_id, field: str, problem: str):
        who = "all clients" if client_id is None else f"client {client_id!r}"
        super().__init__(f"{who}, field {field!r}: {problem}")
        self.client_id = client_id
        self.field = field


def check_image_spec(client_id, shape, dtype) -> None:
    """Checks the shape (without the leading n) and dtype of images.

    Raises:
      ClientDataError: not uint8 or float32, or neither [h, w, c] with c 1 or 3 nor [d].
    """
    if dtype not in (np.uint8, np.float32):
        raise ClientDataError(
            client_id,
            "x",
            f"dtype is {np.dtype(dtype)}; give uint8 in 0..255 or float32 in [0, 1]",
        )
    shape = list(shape)
    described = ", ".join(["n", *map(str, shape)])
    if len(shape) == 2:
        raise ClientDataError(
            client_id, "x", f"shape is [{described}]; add the channel axis: x[..., None]"
        )
    if len(shape) not in (1, 3) or 0 in shape:
        raise ClientDataError(
            client_id, "x", f"shape is [{described}]; give [n, h, w, c], or [n, d] for features"
        )
    if len(shape) == 3 and shape[-1] not in (1, 3):
        raise ClientDataError(
            client_id, "x", f"shape is [{described}]; the last axis must hold 1 or 3 channels"
        )


def check_image_values(x: np.ndarray, owner: Callable[[int], object]) -> None:
    """Checks that float values are finite and, for images [n, h, w, c], in [0, 1].

    Flat features [n, d] need only be finite: they are not images and never augmented.

    Args:
      x: uint8 or float32 [n, ...].
      owner: row number -> client id, for the message.

    Raises:
      ClientDataError: naming the first client at fault.
    """
    if x.dtype == np.uint8:
        return
    for start in range(0, len(x), _CHUNK):  # In chunks: the masks are as large as the images.
        chunk = x[start : start + _CHUNK]
        if not np.isfinite(chunk).all():
            row = start + _first_row(~np.isfinite(chunk))
            raise ClientDataError(owner(row), "x", f"image {row} holds NaN or infinity")
        if x.ndim == 4 and (chunk.min() < 0 or chunk.max() > 1):
            row = start + _first_row((chunk < 0) | (chunk > 1))
            raise ClientDataError(
                owner(row),
                "x",
                f"image {row} has values in [{x[row].min():g}, {x[row].max():g}]; float images "
                "must be in [0, 1] (divide by 255, or give uint8)",
            )


def check_label_dtype(client_id, dtype, field: str = "y") -> None:
    """Raises ClientDataError when labels are not integers."""
    dtype = np.dtype(dtype)
    if np.issubdtype(dtype, np.integer):
        return
    how = {
        "O": '; convert a pandas column of numbers with .astype("Int64"), one of names with '
        "pandas.factorize(column)[0]",
        "U": "; convert names with pandas.factorize(column)[0]",
    }.get(dtype.kind, "")
    raise ClientDataError(client_id, field, f"dtype is {dtype}; give integers{how}")


def check_labels(
    y: np.ndarray,
    rows: np.ndarray,
    num_classes: int | None,
    owner: Callable[[int], object],
    field: str = "y",
) -> None:
    """Checks labels of `rows` against 0..num_classes - 1 (`MOST_CLASSES` if it is None).

    Raises:
      ClientDataError: naming the first client at fault.
    """
    labels = y[rows]
    limit = MOST_CLASSES if num_classes is None else num_classes
    wrong = (labels < 0) | (labels >= limit)
    if not wrong.any():
        return
    row = int(rows[_first_row(wrong)])
    classes = f"0..{limit - 1}"
    raise ClientDataError(owner(row), field, f"label {y[row]} of image {row} is not {classes}")


def _first_row(mask: np.ndarray) -> int:
    return int(np.argmax(mask.reshape(len(mask), -1).any(axis=1)))


def label_name_tuple(label_names) -> tuple[str, ...]:
    """The names of classes, checked.

    Raises:
      ValueError: they are not a sequence of different names; `WrongTypeError`, a `TypeError` too,
        if they are not a sequence.
    """
    if isinstance(label_names, str) or not hasattr(label_names, "__len__"):
        raise WrongTypeError(
            f"label_names must be a list with one name for each class, got {label_names!r}."
        )
    names = tuple(map(str, label_names))
    if not names or len(set(names)) < len(names):
        raise ValueError(f"label_names must be different names, at least one, got {names}.")
    return names
