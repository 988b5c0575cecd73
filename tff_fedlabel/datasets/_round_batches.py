"""The batches of one client in one round, and of all clients of a round."""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_fedlabel._validation import check_flag, check_images_per_round, check_int, check_seed

_LABELED, _UNLABELED = 0, 1
_SAMPLING = 1  # Separates the random stream of client sampling from others of the same seed.


@dataclasses.dataclass(frozen=True)
class RoundOptions:
    """The options of `FederatedData.client_dataset`, which documents them."""

    labeled_steps: int | None
    unlabeled_steps: int | None
    batch_size: int
    unlabeled_batch_size: int | None = None
    seed: int = 0
    with_hidden_labels: bool = False

    def __post_init__(self):
        sizes = {"batch_size": check_int("batch_size", self.batch_size)}
        for name in ("labeled_steps", "unlabeled_steps", "unlabeled_batch_size"):
            value = getattr(self, name)
            sizes[name] = None if value is None else check_int(name, value)
        if sizes["unlabeled_batch_size"] is None:
            sizes["unlabeled_batch_size"] = sizes["batch_size"]
        for part in ("labeled", "unlabeled"):
            batch_size = sizes["batch_size" if part == "labeled" else "unlabeled_batch_size"]
            check_images_per_round(f"{part}_steps", sizes[f"{part}_steps"] or 1, batch_size)
        flag = check_flag("with_hidden_labels", self.with_hidden_labels)
        checked = {**sizes, "seed": check_seed(self.seed), "with_hidden_labels": flag}
        for name, value in checked.items():
            object.__setattr__(self, name, value)


class Cohort(Sequence):
    """The client data of a round, with `len`, indexing, slicing and iteration like a list.

    An item is built on access and not kept, so that a thread can build the data it is about to
    use, and a large cohort is never in memory at once. A cohort may be used from several threads.
    An item is the same each time.

    Attributes:
      client_ids: tuple of the clients' ids, in order.
      round_num: number of the round.
    """

    def __init__(self, make: Callable[[Any], Any], client_ids: Sequence, round_num: int):
        self._make = make
        self._client_ids = tuple(client_ids)
        self._round_num = round_num

    @property
    def client_ids(self) -> tuple:
        return self._client_ids

    @property
    def round_num(self) -> int:
        return self._round_num

    def part(self, name: str) -> "Cohort":
        """The cohort whose items are the part `name` of the items here."""
        return Cohort(lambda client: self._make(client)[name], self._client_ids, self._round_num)

    def __len__(self) -> int:
        return len(self._client_ids)

    def __getitem__(self, index):
        chosen = self._client_ids[index]
        if isinstance(index, slice):
            return Cohort(self._make, chosen, self._round_num)
        return self._make(chosen)

    def __repr__(self) -> str:
        return f"Cohort({len(self)} clients, round {self._round_num})"


def draw_clients(clients: int, number: int, round_num: int, seed: int) -> np.ndarray:
    """Numbers of the clients of a round, drawn without replacement; int64 [number].

    Every set of `number` of the `clients` is equally likely, and rounds are independent.
    """
    rng = np.random.default_rng(np.random.SeedSequence((_SAMPLING, seed, round_num)))
    return rng.choice(clients, size=number, replace=False)


def client_rows(
    labeled: np.ndarray, unlabeled: np.ndarray, client_id, round_num: int, options: RoundOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of the labelled and of the unlabelled batches, each concatenated."""
    key = (options.seed, round_num, _stable_hash(client_id))
    return (
        _round_rows(labeled, options.labeled_steps, options.batch_size, (*key, _LABELED)),
        _round_rows(
            unlabeled, options.unlabeled_steps, options.unlabeled_batch_size, (*key, _UNLABELED)
        ),
    )


def client_datasets(
    labeled: tuple[np.ndarray, np.ndarray],
    unlabeled: tuple[np.ndarray, ...],
    options: RoundOptions,
) -> collections.OrderedDict:
    """Makes OrderedDict(labeled=, unlabeled=) of tf.data from the concatenated images.

    Args:
      labeled: (x [n, ...], y int32 [n]).
      unlabeled: (x [n, ...],) or (x [n, ...], y int32 [n]).
      options: only the batch sizes are used.

    Returns:
      What `from_tensor_slices(OrderedDict(x=, y=)).batch(size)` gives for each, in less time and
      memory.
    """
    # Datasets live on the host; without this the images would go to a GPU and back.
    with tf.device("/device:CPU:0"):
        return collections.OrderedDict(
            labeled=_batches(labeled, options.batch_size),
            unlabeled=_batches(unlabeled, options.unlabeled_batch_size),
        )


def _batches(columns: tuple[np.ndarray, ...], batch_size: int) -> tf.data.Dataset:
    """One dataset, made by a single operation if all its batches have the same size.

    TensorFlow builds, places and optimises a graph for each eager dataset operation, every time:
    nearly the whole cost of a dataset. A `tf.function` of them is built once, but runs in the
    thread pool that clients train in, and waits there behind whole training steps.
    """
    number = len(columns[0])
    specs = _specs(tuple((column.shape[1:], column.dtype.name) for column in columns))
    shapes = [spec.shape for spec in specs.values()]
    size = min(batch_size, max(number, 1))
    if number % size == 0:
        batches = [column.reshape(-1, size, *column.shape[1:]) for column in columns]
        variant = tf.raw_ops.TensorSliceDataset(components=batches, output_shapes=shapes)
        return _Batches(variant, specs)
    images = tf.raw_ops.TensorSliceDataset(
        components=columns, output_shapes=[shape[1:] for shape in shapes]
    )
    variant = tf.raw_ops.BatchDatasetV2(
        input_dataset=images,
        batch_size=batch_size,
        drop_remainder=False,
        output_types=[spec.dtype for spec in specs.values()],
        output_shapes=shapes,
    )
    return _Batches(variant, specs)


@functools.lru_cache(maxsize=64)
def _specs(forms: tuple[tuple[tuple[int, ...], str], ...]) -> collections.OrderedDict:
    return collections.OrderedDict(
        (name, tf.TensorSpec([None, *shape], dtype))
        for name, (shape, dtype) in zip(("x", "y"), forms, strict=False)
    )


class _Batches(tf.data.Dataset):
    """A source dataset of batches.

    Like one from `tf.data.experimental.from_variant`, but known to have no earlier stages; one
    from there a reader must treat as possibly shuffled.
    """

    def __init__(self, variant: tf.Tensor, spec: collections.OrderedDict):
        self._spec = spec
        super().__init__(variant)

    def _inputs(self) -> list:
        return []

    @property
    def element_spec(self) -> collections.OrderedDict:
        return self._spec.copy()


def _stable_hash(client_id) -> int:
    # Python's own hash of a str differs from process to process.
    digest = hashlib.blake2b(str(client_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _round_rows(rows, steps, batch_size, key) -> np.ndarray:
    """Row numbers of one round's batches, concatenated."""
    if not len(rows):
        return rows
    number = len(rows) if steps is None else steps * batch_size
    rng = np.random.default_rng(np.random.SeedSequence(key))
    passes = -(-number // len(rows))
    return np.concatenate([rng.permutation(rows) for _ in range(passes)])[:number]
