"""Clients: who holds which images, which of them are labelled, and the batches of one round.

    data = from_arrays(x, y, client_ids, labeled)
    client_data = [data.client_dataset(i, round_num, labeled_steps=10, unlabeled_steps=10,
                                       batch_size=32) for i in data.client_ids[:5]]
    process.next(state, client_data)

Images are held once, in the array they came in; clients are row numbers into it.
"""

import collections
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import tensorflow as tf

from tff_fedlabel.datasets import _checks, _reading, partition
from tff_fedlabel.datasets._checks import ClientDataError
from tff_fedlabel.datasets.sources import Examples

__all__ = [
    "ClientDataError",
    "FederatedData",
    "evaluation_dataset",
    "from_arrays",
    "from_datasets",
    "from_source",
]

ClientId = str | int
_NO_LABEL = -1
_LABELED, _UNLABELED = 0, 1


class FederatedData:
    """Images of many clients, each image labelled or not. Made by the functions of this module.

    Attributes:
      client_ids: list of str or int, in ascending order.
      num_classes: number of classes.
      label_names: tuple of `num_classes` names.
      hidden_y: int32 [n] true labels of all images, or None where they are not known. They are for
        diagnosis in simulations and reach no training batch unless asked for.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        rows: Mapping[ClientId, tuple[np.ndarray, np.ndarray]],
        *,
        num_classes: int,
        label_names: Sequence[str] | None = None,
        hidden_y: np.ndarray | None = None,
    ):
        """Takes checked arguments: see `from_arrays`, `from_datasets`, `from_source`.

        Args:
          x: uint8 or float32 [n, h, w, c], or [n, d].
          y: int32 [n], -1 where not labelled.
          rows: client id -> (labelled, unlabelled) row numbers.
          num_classes: number of classes.
          label_names: names of the classes; default "0", "1", ...
          hidden_y: int32 [n] or None.
        """
        self._x = x
        self._y = y
        self._rows = dict(rows)
        self.client_ids = list(self._rows)
        self.num_classes = int(num_classes)
        self.label_names = tuple(label_names or map(str, range(self.num_classes)))
        self.hidden_y = hidden_y

    def __repr__(self) -> str:
        labeled = sum(len(labeled) for labeled, _ in self._rows.values())
        unlabeled = sum(len(unlabeled) for _, unlabeled in self._rows.values())
        return (
            f"FederatedData({len(self.client_ids)} clients, {labeled} labelled and {unlabeled} "
            f"unlabelled {self._x.dtype} images {list(self._x.shape[1:])}, "
            f"{self.num_classes} classes)"
        )

    @property
    def input_spec(self) -> collections.OrderedDict:
        """Element spec of a labelled batch: OrderedDict(x=[None, ...], y=int32 [None])."""
        return collections.OrderedDict(
            x=tf.TensorSpec([None, *self._x.shape[1:]], tf.as_dtype(self._x.dtype)),
            y=tf.TensorSpec([None], tf.int32),
        )

    def element_spec(self, with_hidden_labels: bool = False) -> collections.OrderedDict:
        """Element specs of what `client_dataset` gives: OrderedDict(labeled=, unlabeled=)."""
        unlabeled = self.input_spec
        if not with_hidden_labels:
            del unlabeled["y"]
        return collections.OrderedDict(labeled=self.input_spec, unlabeled=unlabeled)

    def sizes(self) -> pd.DataFrame:
        """Images by client: columns client_id, labeled, unlabeled, total."""
        labeled = [len(labeled) for labeled, _ in self._rows.values()]
        unlabeled = [len(unlabeled) for _, unlabeled in self._rows.values()]
        frame = pd.DataFrame(
            {"client_id": self.client_ids, "labeled": labeled, "unlabeled": unlabeled}
        )
        frame["total"] = frame["labeled"] + frame["unlabeled"]
        return frame

    def class_counts(self, part: str = "all") -> np.ndarray:
        """Images by client and class.

        Args:
          part: "labeled", "unlabeled" or "all"; the latter two need hidden labels.

        Returns:
          int64 [clients, num_classes], clients in the order of `client_ids`.

        Raises:
          ValueError: unknown `part`, or hidden labels are not known.
        """
        if part not in ("labeled", "unlabeled", "all"):
            raise ValueError(f"part must be 'labeled', 'unlabeled' or 'all', got {part!r}")
        labels = self._y if part == "labeled" else self._known_hidden("class_counts")
        counts = np.zeros((len(self.client_ids), self.num_classes), np.int64)
        for client, (labeled, unlabeled) in enumerate(self._rows.values()):
            if part != "unlabeled":
                counts[client] += np.bincount(labels[labeled], minlength=self.num_classes)
            if part != "labeled":
                counts[client] += np.bincount(labels[unlabeled], minlength=self.num_classes)
        return counts

    def client_dataset(
        self,
        client_id: ClientId,
        round_num: int,
        *,
        labeled_steps: int | None,
        unlabeled_steps: int | None,
        batch_size: int,
        unlabeled_batch_size: int | None = None,
        seed: int = 0,
        with_hidden_labels: bool = False,
    ) -> collections.OrderedDict:
        """One client's batches for one round, as `process.next` takes them.

        The order is that of shuffle, repeat, batch, take: each pass over the client's images is
        in a new order, drawn from (seed, round_num, client_id) alone. The shuffling is on row
        numbers, so the datasets hold the images of this round's batches and nothing else.

        Args:
          client_id: one of `client_ids`.
          round_num: number of the round, >= 0.
          labeled_steps: tau, the number of labelled batches, all full: images come up again when
            there are too few. None is one pass over all images, the last batch partial.
          unlabeled_steps: tau', the same for unlabelled batches.
          batch_size: images in a batch.
          unlabeled_batch_size: images in an unlabelled batch, default `batch_size`.
          seed: >= 0.
          with_hidden_labels: unlabelled batches carry their true labels as `y`, for builders made
            with `diagnose=True`.

        Returns:
          OrderedDict(labeled=Dataset of OrderedDict(x, y), unlabeled=Dataset of OrderedDict(x)),
          x of the data's dtype [b, ...], y int32 [b]. A part without images has no batches.

        Raises:
          ValueError: unknown client, a number out of range, or hidden labels asked for and not
            known.
        """
        if client_id not in self._rows:
            raise ValueError(f"there is no client {client_id!r}")
        for name, steps in (("labeled_steps", labeled_steps), ("unlabeled_steps", unlabeled_steps)):
            if steps is not None:
                _check_int(name, steps, 1)
        if unlabeled_batch_size is None:
            unlabeled_batch_size = batch_size
        _check_int("batch_size", batch_size, 1)
        _check_int("unlabeled_batch_size", unlabeled_batch_size, 1)
        _check_int("round_num", round_num, 0)
        _check_int("seed", seed, 0)
        hidden = self._known_hidden("with_hidden_labels") if with_hidden_labels else None
        labeled, unlabeled = self._rows[client_id]
        key = (int(seed), int(round_num), _stable_hash(client_id))
        labeled = _round_rows(labeled, labeled_steps, batch_size, (*key, _LABELED))
        unlabeled = _round_rows(
            unlabeled, unlabeled_steps, unlabeled_batch_size, (*key, _UNLABELED)
        )
        return collections.OrderedDict(
            labeled=_batches(self._x, self._y, labeled, batch_size),
            unlabeled=_batches(self._x, hidden, unlabeled, unlabeled_batch_size),
        )

    def all_labeled(self) -> "FederatedData":
        """The same images with every one labelled: what an upper bound trains on.

        Raises:
          ValueError: the true labels of the unlabelled images are not known.
        """
        hidden = self._known_hidden("all_labeled")
        none = np.zeros(0, np.int64)
        rows = {
            client: (np.sort(np.concatenate(parts)), none) for client, parts in self._rows.items()
        }
        return FederatedData(
            self._x,
            hidden,
            rows,
            num_classes=self.num_classes,
            label_names=self.label_names,
            hidden_y=hidden,
        )

    def _known_hidden(self, purpose: str) -> np.ndarray:
        if self.hidden_y is None:
            raise ValueError(
                f"{purpose} needs the true labels of the unlabelled images, which are not known "
                "here (give hidden_y to from_arrays)"
            )
        return self.hidden_y


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

    Args:
      x: uint8 in 0..255 or float32 in [0, 1], [n, h, w, c] with c 1 or 3; or flat features [n, d],
        uint8 or any finite float32. Kept, not copied: do not write to it afterwards.
      y: integer [n], 0..num_classes - 1; ignored where not labelled.
      client_ids: [n], all str or all integers: who holds each image.
      labeled: bool [n].
      num_classes: default: one more than the largest label.
      label_names: one for each class.
      hidden_y: integer [n], true labels of all images where they are known (simulations), for
        diagnosis and `all_labeled`; default: not known.

    Returns:
      The same kind of object as the built-in tasks use.

    Raises:
      ClientDataError: naming the client and the field at fault.
    """
    x, y, labeled = np.asarray(x), np.asarray(y), np.asarray(labeled)
    client_ids = np.asarray(client_ids)
    if not x.ndim or not len(x):
        raise ClientDataError(None, "x", "there are no images")
    for field, column in (("y", y), ("client_ids", client_ids), ("labeled", labeled)):
        _check_column(field, column, len(x))
    if labeled.dtype != np.bool_:
        raise ClientDataError(None, "labeled", f"dtype is {labeled.dtype}; give booleans")
    client_ids, owner_number, order = _group(client_ids)
    _checks.check_image_spec(None, x.shape[1:], x.dtype)
    _checks.check_label_dtype(None, y.dtype)
    if hidden_y is not None:
        hidden_y = np.asarray(hidden_y)
        _check_column("hidden_y", hidden_y, len(x))
        _checks.check_label_dtype(None, hidden_y.dtype, "hidden_y")
    rows = {}
    for client, own in zip(client_ids, order, strict=True):
        rows[client] = (own[labeled[own]], own[~labeled[own]])
    return _checked(
        x,
        y,
        rows,
        lambda row: client_ids[owner_number[row]],
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
    """Clients from `tf.data`, read to the end, once, in this call.

    Args:
      datasets: client id -> (labelled, unlabelled), unbatched: single images. The first has
        elements dict(x=, y=), the second dict(x=), a `y` there is ignored; either may be None.
        x and y as in `from_arrays`.
      num_classes: default: one more than the largest label.
      label_names: one for each class.

    Returns:
      The same kind of object as the built-in tasks use.

    Raises:
      ClientDataError: naming the client and the field at fault.
    """
    num_classes = _number_of_classes(num_classes, label_names)
    images, labels, rows, owners = [], [], {}, []
    start = 0
    for client in _sorted_ids(datasets):
        parts = []
        for part, dataset in zip(("labeled", "unlabeled"), datasets[client], strict=True):
            read = _reading.read_dataset(client, part, dataset, num_classes)
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
    return _checked(
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
) -> FederatedData:
    """Clients of a simulation: labelled images partitioned, most labels then hidden.

    Args:
      examples: images and labels, for instance `sources.load(...).train`.
      parts: row numbers by client, as `partition.partition` gives; clients are named 0, 1, ...
      labeled_fraction: share of each client's images that stays labelled, in (0, 1].
      seed: decides which ones.
      num_classes: default: one more than the largest label.
      label_names: one for each class.

    Returns:
      Clients with hidden labels known.

    Raises:
      ClientDataError: images or labels are unusable.
      ValueError: `labeled_fraction` out of range, or `parts` names a row twice or one that does
        not exist.
    """
    partition.check_labeled_fraction(labeled_fraction)
    number = len(examples.x)
    if not number:
        raise ClientDataError(None, "x", "there are no images")
    parts = [np.asarray(part, np.int64) for part in parts]
    if not parts:
        raise ValueError("parts must name the images of at least one client")
    used = np.concatenate(parts)
    if used.size and (used.min() < 0 or used.max() >= number):
        raise ValueError(f"parts must hold row numbers 0..{number - 1}")
    owner = np.full(number, -1)
    owner[used] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    if np.count_nonzero(owner >= 0) != used.size:
        raise ValueError("parts must not name an image twice")
    _checks.check_image_spec(None, examples.x.shape[1:], examples.x.dtype)
    _check_column("y", examples.y, number)
    _checks.check_label_dtype(None, examples.y.dtype)
    rows = {
        client: partition.split_labeled(part, labeled_fraction, seed, client)
        for client, part in enumerate(parts)
    }
    return _checked(
        examples.x,
        examples.y,
        rows,
        lambda row: int(owner[row]),
        num_classes=num_classes,
        label_names=label_names,
        hidden_y=examples.y,
    )


def evaluation_dataset(examples: Examples, batch_size: int) -> tf.data.Dataset:
    """All examples in order: Dataset of OrderedDict(x uint8 [b, h, w, c], y int32 [b])."""
    _check_int("batch_size", batch_size, 1)
    return _batches(examples.x, examples.y, np.arange(len(examples.y)), batch_size)


def _checked(x, y, rows, owner, *, num_classes, label_names, hidden_y=None) -> FederatedData:
    """Checks values, hides the labels that are not to be seen, and builds the object."""
    _checks.check_image_values(x, owner)
    labeled_rows = np.sort(np.concatenate([labeled for labeled, _ in rows.values()]))
    all_rows = np.sort(np.concatenate([np.concatenate(parts) for parts in rows.values()]))
    num_classes = _number_of_classes(num_classes, label_names)
    _checks.check_labels(y, labeled_rows, num_classes, owner)
    if hidden_y is not None:
        _checks.check_labels(hidden_y, all_rows, num_classes, owner, "hidden_y")
        differs = hidden_y[labeled_rows] != y[labeled_rows]
        if differs.any():
            row = int(labeled_rows[np.argmax(differs)])
            raise ClientDataError(owner(row), "hidden_y", f"differs from y at image {row}")
    if num_classes is None:
        known = y[labeled_rows] if hidden_y is None else hidden_y[all_rows]
        if not len(known):
            raise ClientDataError(None, "y", "no image is labelled; give num_classes")
        num_classes = int(known.max()) + 1
    visible = np.full(len(x), _NO_LABEL, np.int32)
    visible[labeled_rows] = y[labeled_rows]
    if hidden_y is not None:
        hidden_y = np.asarray(hidden_y, np.int32)
    return FederatedData(
        x, visible, rows, num_classes=num_classes, label_names=label_names, hidden_y=hidden_y
    )


def _number_of_classes(num_classes: int | None, label_names) -> int | None:
    """What the caller says it is; None where that is to be seen from the labels."""
    if num_classes is not None:
        _check_int("num_classes", num_classes, 1)
    if label_names is None:
        return num_classes
    if num_classes not in (None, len(label_names)):
        raise ValueError(f"label_names has {len(label_names)} names for {num_classes} classes")
    return len(label_names)


def _check_column(field: str, column: np.ndarray, number: int) -> None:
    if column.ndim != 1:
        raise ClientDataError(None, field, f"shape is {list(column.shape)}; give [n]")
    if len(column) != number:
        raise ClientDataError(None, field, f"{len(column)} entries for {number} images")


def _group(client_ids: np.ndarray) -> tuple[list[ClientId], np.ndarray, list[np.ndarray]]:
    """Distinct ids in order, the number of each row's client, and each client's rows."""
    distinct = _sorted_ids(dict.fromkeys(client_ids.tolist()))
    number = {client: k for k, client in enumerate(distinct)}
    owner = np.array([number[client] for client in client_ids.tolist()])
    order = np.argsort(owner, kind="stable")
    return distinct, owner, np.split(order, np.searchsorted(owner[order], range(1, len(distinct))))


def _sorted_ids(client_ids: Any) -> list[ClientId]:
    """Client ids in ascending order: the order in the input must not matter for a run."""
    plain = [client.item() if isinstance(client, np.generic) else client for client in client_ids]
    for kind in (str, int):
        if all(isinstance(c, kind) and not isinstance(c, bool) for c in plain):
            return sorted(plain)
    raise ClientDataError(None, "client_ids", "give all str or all integers")


def _stable_hash(client_id: ClientId) -> int:
    # Python's own hash of a str differs from process to process.
    digest = hashlib.blake2b(str(client_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _round_rows(rows, steps, batch_size, key) -> np.ndarray:
    """Row numbers of one round's batches, laid end to end."""
    if not len(rows):
        return rows
    number = len(rows) if steps is None else steps * batch_size
    rng = np.random.default_rng(np.random.SeedSequence(key))
    passes = -(-number // len(rows))
    return np.concatenate([rng.permutation(rows) for _ in range(passes)])[:number]


def _batches(x, y, rows, batch_size) -> tf.data.Dataset:
    element = collections.OrderedDict(x=x[rows])
    if y is not None:
        element["y"] = y[rows]
    return tf.data.Dataset.from_tensor_slices(element).batch(batch_size)


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
