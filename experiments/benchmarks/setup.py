"""Models, images and clients of the benchmarks."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tff_fedlabel import models
from tff_fedlabel.datasets import federated

SHAPE, CLASSES = (28, 28, 1), 10


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
      runtime: The runtime that is measured.
      repeats: The number of turns.
      quick: Whether sizes are small, to see that everything works.
      data_dir: Where CIFAR-10 lies, or None.
    """

    runtime: str
    repeats: int
    quick: bool
    data_dir: str | None


def cnn(width: int = 16):
    keras_model = models.build_keras("cnn", SHAPE, CLASSES, width=width)
    return models.functional_model(keras_model, input_shape=SHAPE)


def linear():
    keras_model = tf.keras.Sequential(
        [tf.keras.Input(SHAPE), tf.keras.layers.Flatten(), tf.keras.layers.Dense(CLASSES)]
    )
    return models.functional_model(keras_model, input_shape=SHAPE)


def clients(
    number: int, labeled: int, unlabeled: int, images: tuple[np.ndarray, np.ndarray] | None = None
) -> federated.FederatedData:
    """`number` clients with so many labelled and unlabelled images each.

    Args:
      number: of clients.
      labeled: images of each client.
      unlabeled: images of each client.
      images: x and y to deal out; by default random ones, on whose values no time depends.
    """
    total = number * (labeled + unlabeled)
    if images is None:
        rng = np.random.default_rng(0)
        images = (
            rng.integers(0, 256, (total, *SHAPE), dtype=np.uint8),
            rng.integers(0, CLASSES, total),
        )
    x, y = images
    return federated.from_arrays(
        x[:total],
        y[:total],
        np.repeat(np.arange(number), labeled + unlabeled),
        np.tile(np.arange(labeled + unlabeled) < labeled, number),
        num_classes=CLASSES,
    )


def round_data(
    data: federated.FederatedData, client_ids: Iterable[int], batch_size: int, round_num: int = 0
) -> list[Any]:
    """One pass over the images of each of these clients."""
    return [
        data.client_dataset(
            client,
            round_num,
            labeled_steps=None,
            unlabeled_steps=None,
            batch_size=batch_size,
        )
        for client in client_ids
    ]


def without_batches(number: int) -> list[Any]:
    """The data of clients that have no images."""
    x, y = np.zeros((0, *SHAPE), np.uint8), np.zeros(0, np.int32)
    slices = tf.data.Dataset.from_tensor_slices
    return [
        collections.OrderedDict(
            labeled=slices(collections.OrderedDict(x=x, y=y)).batch(1),
            unlabeled=slices(collections.OrderedDict(x=x)).batch(1),
        )
        for _ in range(number)
    ]
