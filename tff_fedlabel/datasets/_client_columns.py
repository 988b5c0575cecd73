"""Converts the columns of `from_arrays`, one entry for each image, from the forms that users have.

These are NumPy arrays, lists, tensors, and pandas columns, including nullable types.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd

from tff_fedlabel.datasets import _client_data_checks
from tff_fedlabel.datasets._client_data_checks import ClientDataError

ClientId = str | int
NO_LABEL = -1
_LABEL_LIMIT = 2**31  # Labels are held as int32.
_HOW_TO_FILL = {
    "x": "fill them: x.filled(0)",
    "y": "where there is no label, give NaN: y.astype(float).filled(np.nan)",
    "labeled": "say what they are: labeled.filled(False)",
    "hidden_y": "every image needs its label there; leave hidden_y out if some are not known",
}


def number_of_images(x: Any) -> int:
    """The length of `x`; ClientDataError where it has none or is empty."""
    try:
        number = len(x)
    except TypeError:
        kind = type(x).__name__
        raise ClientDataError(
            None, "x", f"is a {kind} without a length; give an array [n, ...]"
        ) from None
    if not number:
        raise ClientDataError(None, "x", "there are no images")
    return number


def check_not_masked(field: str, values: Any) -> None:
    """Raises ClientDataError for a masked array with gaps, which a plain one would not have."""
    number = np.ma.count_masked(values) if isinstance(values, np.ma.MaskedArray) else 0
    if number:
        raise ClientDataError(
            None,
            field,
            f"is a masked array with {number} masked entries, which would count as values; "
            f"{_HOW_TO_FILL.get(field, 'fill them: values.filled(...)')}",
        )


def image_array(x: Any, owner: Callable[[int], ClientId]) -> np.ndarray:
    """`x` as one array, not copied if it is already one.

    Raises:
      ClientDataError: the images have different sizes, naming the first that differs from image 0;
        or some of their pixels are masked.
    """
    check_not_masked("x", x)
    try:
        array = np.asarray(x)
    except ValueError:  # A list of arrays that do not fit together.
        array = None
    if array is not None and array.dtype != object:
        return array
    first = None
    for row, image in enumerate(x):
        shape = _shape(image)
        first = shape if row == 0 else first
        if shape != first:
            raise ClientDataError(
                owner(row),
                "x",
                f"image {row} has shape {shape} and image 0 {first}; resize all to one shape",
            )
    raise ClientDataError(None, "x", "dtype is object; make one array of it: np.stack(list(x))")


def client_id_list(client_ids: Any, number: int) -> list[ClientId]:
    """The ids as Python's str or int, in the order given.

    They never pass through an array, which would turn the 1 of [1, "a"] into "1".

    Raises:
      ClientDataError: not one id for each of `number` images, or a mixture of types.
    """
    if hasattr(client_ids, "numpy"):  # a tensor
        client_ids = client_ids.numpy()
    shape = getattr(client_ids, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ClientDataError(None, "client_ids", f"shape is {list(shape)}; give [n]")
    if isinstance(client_ids, str) or not isinstance(client_ids, Iterable):
        raise ClientDataError(None, "client_ids", f"is {client_ids!r}; give one id for each image")
    # tolist() also undoes pandas' categories and nullable integers.
    values = client_ids.tolist() if hasattr(client_ids, "tolist") else list(client_ids)
    if len(values) != number:
        raise ClientDataError(None, "client_ids", f"{len(values)} entries for {number} images")
    return plain_ids(values)


def plain_ids(values: list) -> list[ClientId]:
    """`values` with NumPy numbers and strings converted to Python's.

    Raises:
      ClientDataError: they are neither all str nor all integers; the message shows two that differ.
    """
    if any(issubclass(kind, np.generic) for kind in set(map(type, values))):
        values = [value.item() if isinstance(value, np.generic) else value for value in values]
    kinds = set(map(type, values))
    if kinds <= {str} or kinds <= {int}:
        return values
    rows = {}  # The first row of each type.
    for row, value in enumerate(values):
        rows.setdefault(type(value), row)
        if _is_missing(value):
            raise ClientDataError(None, "client_ids", f"entry {row} is missing ({value!r})")
    found = " and ".join(
        f"entry {row} is {_short(values[row])} ({kind.__name__})"
        for kind, row in list(rows.items())[:2]
    )
    raise ClientDataError(None, "client_ids", f"{found}; give all str or all integers")


def flag_column(field: str, values: Any, number: int) -> np.ndarray:
    """bool [n].

    Raises:
      ClientDataError: another dtype, a missing value, or not [n].
    """
    flags = _to_numpy(field, values, number)
    if flags.dtype != np.bool_:
        raise ClientDataError(None, field, f"dtype is {flags.dtype}; give booleans")
    return flags


def label_column(
    field: str, values: Any, number: int, rows: np.ndarray, owner: Callable[[int], ClientId]
) -> np.ndarray:
    """Integer [n].

    Args:
      field: "y" or "hidden_y".
      values: integers, floats (as pandas makes of a column with missing values), or a pandas
        nullable type.
      number: n.
      rows: the row numbers that must have a label. Floats elsewhere become -1.
      owner: row number -> client id, for the message.

    Raises:
      ClientDataError: naming the client that lacks a label or has one that is not a whole number.
    """
    labels = _to_numpy(field, values, number)
    if labels.dtype.kind != "f":
        _client_data_checks.check_label_dtype(None, labels.dtype, field)
        return labels
    needed = labels[rows]
    for wrong, problem in (
        (np.isnan(needed), "image {row} has no label; give one{or_else}"),
        (needed != np.rint(needed), "label {label:g} of image {row} is not a whole number"),
        (np.abs(needed) >= _LABEL_LIMIT, "label {label:g} of image {row} is too large"),
    ):
        if wrong.any():
            row = int(rows[np.argmax(wrong)])
            or_else = ", or set labeled to False there" if field == "y" else ""
            text = problem.format(row=row, label=labels[row], or_else=or_else)
            raise ClientDataError(owner(row), field, text)
    result = np.full(number, NO_LABEL, np.int64)
    result[rows] = needed.astype(np.int64)
    return result


def check_column(field: str, column: np.ndarray, number: int) -> None:
    """Raises ClientDataError unless `column` has shape [number] and no gaps."""
    check_not_masked(field, column)
    if column.ndim != 1:
        raise ClientDataError(None, field, f"shape is {list(column.shape)}; give [n]")
    if len(column) != number:
        raise ClientDataError(None, field, f"{len(column)} entries for {number} images")


def _to_numpy(field: str, values: Any, number: int) -> np.ndarray:
    """An array [n]; pandas nullable types become plain ones, with gaps as NaN in floats."""
    check_not_masked(field, values)  # Which `np.asarray` takes for a plain one.
    if _is_nullable(values):
        gaps = np.asarray(values.isna())
        if not gaps.any():
            column = values.to_numpy(dtype=values.dtype.numpy_dtype)
        elif values.dtype.kind == "b":
            raise ClientDataError(None, field, f"entry {int(np.argmax(gaps))} is missing")
        else:
            column = values.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        try:
            column = np.asarray(values)
        except ValueError:
            raise ClientDataError(None, field, "entries differ in length; give [n]") from None
    check_column(field, column, number)
    return column


def _is_nullable(values: Any) -> bool:
    """Whether it is a pandas column of nullable integers, floats or booleans."""
    dtype = getattr(values, "dtype", None)
    is_extension = isinstance(dtype, pd.api.extensions.ExtensionDtype)
    return is_extension and hasattr(dtype, "numpy_dtype") and dtype.kind in "iufb"


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value))


def _shape(image: Any) -> list[int | None]:
    try:
        return list(np.shape(image))
    except ValueError:  # A list of rows of different lengths.
        return [len(image), None]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
