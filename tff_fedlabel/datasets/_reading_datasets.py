"""Reads one client's `tf.data` to the end and rejects elements of the wrong form."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tff_fedlabel.datasets import _client_data_checks
from tff_fedlabel.datasets._client_data_checks import ClientDataError

_BATCH = 256


def read_dataset(
    client_id, part: str, dataset, num_classes: int | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Reads an unbatched dataset of dict(x=, y=) ("labeled") or dict(x=) ("unlabeled").

    Values are checked too, so that messages count images from the start of this dataset.

    Returns:
      (images [n, ...], labels int64 [n], -1 where unlabelled), or None if there is no dataset.

    Raises:
      ClientDataError: naming the client and the field at fault.
    """
    if dataset is None:
        return None
    if not isinstance(dataset, tf.data.Dataset):
        raise ClientDataError(
            client_id, "x", f"the {part} part is {type(dataset).__name__}, not a tf.data.Dataset"
        )
    spec = dataset.element_spec
    fields = ("x", "y") if part == "labeled" else ("x",)
    if not isinstance(spec, Mapping):
        wanted = ", ".join(f"{field}=" for field in fields)
        raise ClientDataError(
            client_id, "x", f"{part} elements are not dict({wanted}); map them into one"
        )
    for field in fields:
        if field not in spec:
            raise ClientDataError(client_id, field, f"missing from the {part} elements")
    _check_spec(client_id, spec, fields)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ClientDataError(client_id, "x", f"the {part} part is infinite; remove repeat()")
    chosen = dataset.map(lambda element: tuple(element[field] for field in fields))
    try:
        batches = list(chosen.batch(_BATCH).as_numpy_iterator())
    except (tf.errors.OpError, ValueError) as error:
        reason = getattr(error, "message", str(error)).strip().splitlines()[0]
        raise ClientDataError(
            client_id, "x", f"the {part} part cannot be read ({reason})"
        ) from error
    if not batches:
        return None
    x = np.concatenate([batch[0] for batch in batches])
    _client_data_checks.check_image_spec(client_id, x.shape[1:], x.dtype)
    _client_data_checks.check_image_values(x, lambda _: client_id)
    if part == "unlabeled":
        return x, np.full(len(x), -1, np.int64)
    y = np.concatenate([batch[1] for batch in batches])
    if y.ndim != 1:
        raise ClientDataError(client_id, "y", f"shape of an element is {list(y.shape[1:])}, not []")
    _client_data_checks.check_labels(y, np.arange(len(y)), num_classes, lambda _: client_id)
    return x, y.astype(np.int64)


def _check_spec(client_id, spec, fields) -> None:
    """Checks what is known before reading: dtypes, and shapes if they are static."""
    for field in fields:
        if not isinstance(spec[field], tf.TensorSpec):
            kind = type(spec[field]).__name__
            raise ClientDataError(client_id, field, f"is a {kind}, not a tensor")
    shape = spec["x"].shape
    dtype = spec["x"].dtype.as_numpy_dtype
    if shape.rank in (2, 4):
        raise ClientDataError(
            client_id,
            "x",
            f"shape of an element is {shape}; give single images [h, w, c] "
            "(for a batched dataset: dataset.unbatch())",
        )
    if shape.is_fully_defined():
        _client_data_checks.check_image_spec(client_id, shape.as_list(), dtype)
    elif dtype not in (np.uint8, np.float32):
        _client_data_checks.check_image_spec(client_id, (1,), dtype)
    if "y" in fields:
        label = spec["y"]
        _client_data_checks.check_label_dtype(client_id, label.dtype.as_numpy_dtype)
        if label.shape.rank not in (0, None):
            raise ClientDataError(client_id, "y", f"shape of an element is {label.shape}, not []")
