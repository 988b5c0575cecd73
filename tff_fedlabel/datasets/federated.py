"""Clients: who holds which images, which of them are labelled, and the batches of one round.

    data = from_arrays(x, y, client_ids, labeled)
    cohort = data.cohort(data.client_ids[:5], round_num, labeled_steps=10, unlabeled_steps=10,
                         batch_size=32)
    process.next(state, list(cohort))

Images are stored once, in the array that was passed; clients are row numbers into it.
"""

import collections
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel._validation import (
    LABELS_AT,
    WrongTypeError,
    check_int,
    check_name,
    check_seed,
    check_type,
)
from tff_fedlabel.datasets import (
    _client_columns,
    _client_data_checks,
    _reading_datasets,
    _tff_clients,
    partition,
    server_labels,
)
from tff_fedlabel.datasets._client_columns import NO_LABEL, ClientId, check_column
from tff_fedlabel.datasets._client_data_checks import ClientDataError, label_name_tuple
from tff_fedlabel.datasets._federated_data import FederatedData
from tff_fedlabel.datasets._round_batches import Cohort
from tff_fedlabel.datasets.sources import Examples

__all__ = [
    "ClientDataError",
    "Cohort",
    "FederatedData",
    "evaluation_dataset",
    "from_arrays",
    "from_client_data",
    "from_datasets",
    "from_source",
]


def from_arrays(
    x: np.ndarray,
    y: np.ndarray,
    client_ids: Sequence[ClientId],
    labeled: np.ndarray,
    *,
    num_classes: int | None = None,
    label_names: Sequence[str] | None = None,
    hidden_y: np.ndarray | None = None,
) -> FederatedData:
    """Clients from arrays with one row for each image.

    Lists and pandas columns (strings, categories, nullable types) are accepted too.

    Args:
      x: uint8 in 0..255 or float32 in [0, 1], [n, h, w, c] with c 1 or 3; or flat features [n, d],
        uint8 or any finite float32. Kept, not copied: do not write to it afterwards.
      y: whole numbers [n], 0..num_classes - 1; ignored for unlabelled images, where they may also
        be missing (NaN or `pandas.NA`).
      client_ids: [n], all str or all integers: the client that holds each image.
      labeled: bool [n].
      num_classes: default: one more than the largest label.
      label_names: one for each class.
      hidden_y: whole numbers [n], true labels of all images if they are known (simulations), for
        diagnosis and `all_labeled`; default: not known.

    Returns:
      The same kind of object as the built-in tasks use.

    Raises:
      ClientDataError: naming the client and the field at fault.
      ValueError: `num_classes` or `label_names` do not fit.
    """
    number = _client_columns.number_of_images(x)
    owners = _client_columns.client_id_list(client_ids, number)
    labeled = _client_columns.flag_column("labeled", labeled, number)
    x = _client_columns.image_array(x, owners.__getitem__)
    _client_data_checks.check_image_spec(None, x.shape[1:], x.dtype)
    y = _client_columns.label_column("y", y, number, np.flatnonzero(labeled), owners.__getitem__)
    if hidden_y is not None:
        hidden_y = _client_columns.label_column(
            "hidden_y", hidden_y, number, np.arange(number), owners.__getitem__
        )
    rows = {
        client: (own[labeled[own]], own[~labeled[own]]) for client, own in rows_by_client(owners)
    }
    return _build_checked(
        x,
        y,
        rows,
        owners.__getitem__,
        num_classes=num_classes,
        label_names=label_names,
        hidden_y=hidden_y,
    )


def from_datasets(
    datasets: Mapping[ClientId, tuple[tf.data.Dataset | None, tf.data.Dataset | None]],
    *,
    num_classes: int | None = None,
    label_names: Sequence[str] | None = None,
) -> FederatedData:
    """Clients from `tf.data`, which this call reads once to the end.

    Args:
      datasets: client id -> (labelled, unlabelled), unbatched: single images. The first has
        elements dict(x=, y=), the second dict(x=) (a `y` is ignored); either may be None.
        x and y as in `from_arrays`.
      num_classes: default: one more than the largest label.
      label_names: one for each class.

    Returns:
      The same kind of object as the built-in tasks use.

    Raises:
      ClientDataError: naming the client and the field at fault.
      ValueError: `num_classes` or `label_names` do not fit.
    """
    check_type("datasets", datasets, Mapping, "a dict of client id -> (labelled, unlabelled)")
    num_classes = _number_of_classes(num_classes, label_names)
    images, labels, rows, owners = [], [], {}, []
    start = 0
    # The order in the input must not matter for a run.
    for client, pair in sorted(
        zip(_client_columns.plain_ids(list(datasets)), datasets.values(), strict=True),
        key=lambda item: item[0],
    ):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ClientDataError(client, "x", "give (labelled, unlabelled); None is no data")
        parts = []
        for part, dataset in zip(("labeled", "unlabeled"), pair, strict=True):
            read = _reading_datasets.read_dataset(client, part, dataset, num_classes)
            number = 0
            if read is not None and len(read[0]):
                x, y = read
                if images and (x.shape[1:], x.dtype) != (images[0].shape[1:], images[0].dtype):
                    raise ClientDataError(
                        client,
                        "x",
                        f"{x.dtype} {list(x.shape[1:])} where client {owners[0]!r} has "
                        f"{images[0].dtype} {list(images[0].shape[1:])}",
                    )
                number = len(x)
                images.append(x)
                labels.append(y)
                owners += [client] * number
            parts.append(np.arange(start, start + number))
            start += number
        rows[client] = tuple(parts)
    if not images:
        raise ClientDataError(None, "x", "there are no images")
    x, y = np.concatenate(images), np.concatenate(labels)
    return _build_checked(
        x, y, rows, owners.__getitem__, num_classes=num_classes, label_names=label_names
    )


def from_source(
    examples: Examples,
    parts: Sequence[np.ndarray],
    labeled_fraction: float,
    seed: int = 0,
    *,
    num_classes: int | None = None,
    label_names: Sequence[str] | None = None,
    client_ids: Sequence[ClientId] | None = None,
    labels_at: str = "every_client",
) -> FederatedData:
    """Clients of a simulation: partitions labelled images, then hides most of the labels.

    Args:
      examples: images and labels, for instance `sources.load(...).train`.
      parts: row numbers by client, as `partition.partition` gives.
      labeled_fraction: share of each client's images that stays labelled, in (0, 1].
      seed: in [0, 2**31), decides which ones.
      num_classes: default: one more than the largest label.
      label_names: one for each class.
      client_ids: names of the clients, in the order of `parts`; default: 0, 1, ...
      labels_at: "every_client"; "server": the images that would be labelled at the clients are at
        the server instead, and the clients have the others; "some_clients": `labeled_fraction` of
        the clients have all their labels, and the others none.

    Returns:
      Clients with hidden labels known; a `server_labels.LabelsAtServer` with "server".

    Raises:
      ClientDataError: images or labels are unusable.
      ValueError: `labeled_fraction` or `seed` out of range, or `parts` contains a row twice or one
        that does not exist. `WrongTypeError`, which is a ValueError too, if a type is wrong.
    """
    partition.check_labeled_fraction(labeled_fraction)
    check_name("labels_at", labels_at, LABELS_AT)
    seed = check_seed(seed)
    number = len(examples.x)
    if not number:
        raise ClientDataError(None, "x", "there are no images")
    parts = [_row_numbers(part) for part in parts]
    if not parts:
        raise ValueError("parts must contain the images of at least one client, got none.")
    names = range(len(parts)) if client_ids is None else client_ids
    names = _client_columns.client_id_list(names, len(parts))
    if len(set(names)) < len(names):
        raise ValueError("client_ids must not contain a client twice.")
    used = np.concatenate(parts)
    if used.size and (used.min() < 0 or used.max() >= number):
        raise ValueError(
            f"parts must hold row numbers 0..{number - 1}, got {used.min()}..{used.max()}."
        )
    owner = np.full(number, -1)
    owner[used] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    if np.count_nonzero(owner >= 0) != used.size:
        row = int(np.argmax(np.bincount(used) > 1))
        raise ValueError(f"parts must not contain an image twice; image {row} is repeated.")
    _client_columns.check_not_masked("x", examples.x)
    _client_data_checks.check_image_spec(None, examples.x.shape[1:], examples.x.dtype)
    check_column("y", examples.y, number)
    _client_data_checks.check_label_dtype(None, examples.y.dtype)
    if labels_at == "some_clients":
        chosen = partition.choose_labeled_clients(parts, labeled_fraction, seed)
        pairs = [
            (part, part[:0]) if keeps_all else (part[:0], part)
            for part, keeps_all in zip(parts, chosen, strict=True)
        ]
    else:
        pairs = [
            partition.split_labeled(part, labeled_fraction, seed, k) for k, part in enumerate(parts)
        ]
    rows = dict(zip(names, pairs, strict=True))
    data = _build_checked(
        examples.x,
        examples.y,
        rows,
        lambda row: names[owner[row]],
        num_classes=num_classes,
        label_names=label_names,
        hidden_y=examples.y,
    )
    return server_labels.move_to_server(data) if labels_at == "server" else data


def from_client_data(
    client_data: tff.simulation.datasets.ClientData,
    labeled_fraction: float,
    seed: int = 0,
    *,
    image_key: str = "pixels",
    label_key: str = "label",
    num_classes: int | None = None,
    label_names: Sequence[str] | None = None,
) -> FederatedData:
    """Clients of a simulation from TFF's own data sets; hides most of their labels.

    Args:
      client_data: For instance `tff.simulation.datasets.emnist.load_data()[0]`. Read once to the
        end, into memory. Its elements, single images, are mappings.
      labeled_fraction: share of each client's images that stays labelled, in (0, 1].
      seed: in [0, 2**31), decides which ones.
      image_key: images, uint8 or float32 in [0, 1], [h, w, c] or [h, w], which gets a channel.
        "pixels" in TFF's EMNIST, "image" in its CIFAR-100.
      label_key: integers.
      num_classes: default: one more than the largest label.
      label_names: one for each class.

    Returns:
      Clients with hidden labels known; their ids are those of `client_data`.

    Raises:
      ClientDataError: naming the client and the field at fault.
      ValueError: `labeled_fraction`, `seed`, `num_classes` or `label_names` do not fit.
    """
    wanted = "a tff.simulation.datasets.ClientData"
    check_type("client_data", client_data, tff.simulation.datasets.ClientData, wanted)
    partition.check_labeled_fraction(labeled_fraction)
    examples, client_ids, parts = _tff_clients.read_clients(client_data, image_key, label_key)
    return from_source(
        examples,
        parts,
        labeled_fraction,
        seed,
        num_classes=num_classes,
        label_names=label_names,
        client_ids=client_ids,
    )


def evaluation_dataset(examples: Examples, batch_size: int) -> tf.data.Dataset:
    """All examples in order: Dataset of OrderedDict(x uint8 [b, h, w, c], y int32 [b]).

    The last batch holds what is left. ValueError if `batch_size` is below 1.
    """
    batch_size = check_int("batch_size", batch_size)
    element = collections.OrderedDict(x=examples.x, y=examples.y)
    return tf.data.Dataset.from_tensor_slices(element).batch(batch_size)


def _build_checked(x, y, rows, owner, *, num_classes, label_names, hidden_y=None) -> FederatedData:
    """Checks values, hides the labels of unlabelled images, and builds the object."""
    _client_data_checks.check_image_values(x, owner)
    labeled_rows = np.sort(np.concatenate([labeled for labeled, _ in rows.values()]))
    all_rows = np.sort(np.concatenate([np.concatenate(parts) for parts in rows.values()]))
    num_classes = _number_of_classes(num_classes, label_names)
    _client_data_checks.check_labels(y, labeled_rows, num_classes, owner)
    if hidden_y is not None:
        _client_data_checks.check_labels(hidden_y, all_rows, num_classes, owner, "hidden_y")
        differs = hidden_y[labeled_rows] != y[labeled_rows]
        if differs.any():
            row = int(labeled_rows[np.argmax(differs)])
            raise ClientDataError(owner(row), "hidden_y", f"differs from y at image {row}")
    if num_classes is None:
        known = y[labeled_rows] if hidden_y is None else hidden_y[all_rows]
        if not len(known):
            raise ClientDataError(None, "y", "no image is labelled; give num_classes")
        num_classes = int(known.max()) + 1
    visible = np.full(len(x), NO_LABEL, np.int32)
    visible[labeled_rows] = y[labeled_rows]
    if hidden_y is not None:
        hidden_y = np.asarray(hidden_y, np.int32)
    return FederatedData(
        x, visible, rows, num_classes=num_classes, label_names=label_names, hidden_y=hidden_y
    )


def _number_of_classes(num_classes: int | None, label_names) -> int | None:
    """The number that the caller gives; None if it is to be inferred from the labels."""
    if num_classes is not None:
        num_classes = check_int(
            "num_classes", num_classes, limit=_client_data_checks.MOST_CLASSES + 1
        )
    if label_names is None:
        return num_classes
    label_names = label_name_tuple(label_names)
    if num_classes not in (None, len(label_names)):
        raise ValueError(
            f"label_names must have one name for each of {num_classes} classes, "
            f"got {len(label_names)}."
        )
    return len(label_names)


def rows_by_client(owners: list[ClientId]) -> list[tuple[ClientId, np.ndarray]]:
    """(client, its row numbers in ascending order), clients in ascending order."""
    # Sorted, since the order in the input must not matter for a run.
    distinct = sorted(set(owners))
    number = {client: k for k, client in enumerate(distinct)}
    numbers = np.array([number[owner] for owner in owners])
    order = np.argsort(numbers, kind="stable")
    starts = np.searchsorted(numbers[order], range(1, len(distinct)))
    return list(zip(distinct, np.split(order, starts), strict=True))


def _row_numbers(part) -> np.ndarray:
    part = np.asarray(part)
    if part.ndim != 1 or (part.size and not np.issubdtype(part.dtype, np.integer)):
        raise WrongTypeError(
            f"parts must hold row numbers, integers [n] for each client, got {part.dtype} "
            f"{list(part.shape)}."
        )
    return part.astype(np.int64)
