"""The CIFAR-10 benchmark of pfl-research: FedAvg with a small CNN, IID clients.

Granqvist et al., "pfl-research: simulation framework for accelerating research in Private
Federated Learning", 2024: 1,000 clients of 50 images, 50 a round, batches of 10, one local epoch,
SGD .1 on the clients and 1 on the server, clients weighted alike.
"""

import os

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import tff_fedlabel
from benchmarks import bare, setup
from benchmarks.harness import Goal, Table, in_turn, runners
from tff_fedlabel import models
from tff_fedlabel.datasets import sources

PARAMETERS = 1_626_442
_SHAPE, _CLIENTS, _IMAGES, _BATCH = (32, 32, 3), 1000, 50, 10


def model():
    """Its CNN, as a `FunctionalModel`."""
    layers = tf.keras.layers
    keras_model = tf.keras.Sequential(
        [
            tf.keras.Input(_SHAPE),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPool2D(2),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )
    assert keras_model.count_params() == PARAMETERS, keras_model.count_params()
    return models.functional_model(keras_model, input_shape=_SHAPE)


def _images(data_dir: str | None) -> tuple[str, tuple[np.ndarray, np.ndarray]]:
    """The name of the images in the table, and x and y of 50,000 of them."""
    number = _CLIENTS * _IMAGES
    if data_dir is not None:
        train = sources.load("cifar10", data_dir, split="official", download=False).train
        # The official split keeps some for validation: those clients get the first ones again.
        rows = np.arange(number) % len(train.y)
        return "CIFAR-10", (train.x[rows], train.y[rows])
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (number, *_SHAPE), dtype=np.uint8)
    return "random images", (x, rng.integers(0, 10, number))


def pfl(table: Table, options: setup.Options) -> None:
    """Seconds a round in a runtime, in TFF's C++ worker and in one `tf.function`."""
    cohort = 2 if options.quick else 50
    name, images = _images(options.data_dir)
    data = setup.clients(_CLIENTS, _IMAGES, 0, images)
    client_ids = np.random.default_rng(0).choice(_CLIENTS, cohort, replace=False).tolist()
    client_data = setup.round_data(data, client_ids, _BATCH)
    cnn, optimizer = model(), tff.learning.optimizers.build_sgdm(0.1)
    process = tff_fedlabel.build_fedavg(
        cnn, optimizer, client_weighting=tff.learning.ClientWeighting.UNIFORM
    )
    client_update = bare.client_update_of("fedavg", cnn, optimizer)
    bare_round = bare.build_round(cnn, optimizer, client_update, uniform=True)
    with runners(options.runtime, "local") as (tested, local):
        seconds = in_turn(
            {
                "tested": tested.round(process, client_data),
                "local": local.round(process, client_data),
                "bare": lambda: bare_round(client_data),
                "data": lambda: setup.round_data(data, client_ids, _BATCH),
            },
            options.repeats,
        )
    labels = {
        "tested": f"{tested.label} round",
        "local": f"{local.label} round",
        "bare": "bare tf.function",
        "data": "building the datasets",
    }
    cores = len(os.sched_getaffinity(0))
    size = f"{cohort} of {_CLIENTS:,} clients, {name}, {cores} core{'s' * (cores > 1)}"
    for a, b, goal in (
        ("tested", "bare", Goal(1.1)),
        ("tested", "local", None),
        ("local", "bare", None),
        ("data", "tested", None),
    ):
        table.add(size, labels[a], labels[b], "s", seconds[a], seconds[b], goal)
