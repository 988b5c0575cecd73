"""The CIFAR-10 benchmark of pfl-research: FedAvg with a small CNN, IID clients.

Granqvist et al., "pfl-research: simulation framework for accelerating research in Private
Federated Learning", 2024: 1,000 clients of 50 images, 50 a round, batches of 10, one local epoch,
SGD .1 on the clients and 1 on the server, clients weighted alike.
"""

import contextlib
import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import tff_fedlabel
from benchmarks import bare, processes, setup
from benchmarks.harness import Goal, Table, in_turn, runners
from tff_fedlabel import models
from tff_fedlabel.datasets import sources
from tff_fedlabel.runtime import device

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


def _arguments():
    """The model and the clients' optimizer."""
    return model(), tff.learning.optimizers.build_sgdm(0.1)


def _process(arguments):
    return tff_fedlabel.build_fedavg(
        *arguments, client_weighting=tff.learning.ClientWeighting.UNIFORM
    )


def _make_data(data_dir: str | None, cohort: int) -> tuple[str, Callable[[], list[Any]]]:
    """The name of the images, and a function that makes the datasets of a round's clients."""
    name, images = _images(data_dir)
    data = setup.clients(_CLIENTS, _IMAGES, 0, images)
    client_ids = np.random.default_rng(0).choice(_CLIENTS, cohort, replace=False).tolist()
    return name, lambda: setup.round_data(data, client_ids, _BATCH)


def _cohort(quick: bool) -> int:
    return 2 if quick else 50


def probe(quick: bool, data_dir: str | None) -> None:
    """Answers "round" with "done" when one is computed, with a run's threads for an operation."""
    answers = processes.answers()
    device.share_cores(_cohort(quick))
    _, make_data = _make_data(data_dir, _cohort(quick))
    with runners("device") as (runner,):
        requests = {
            "versions": lambda: "device round, threads as in a run",
            "round": runner.round(_process(_arguments()), make_data()),
        }
        processes.answer(requests, answers)


def pfl(table: Table, script: str, options: setup.Options, other_python: str | None) -> None:
    """Seconds a round in a runtime, in TFF's C++ worker, in one `tf.function`, in pfl-research.

    Args:
      table: Gets the rows.
      script: The script that calls `probe` on `--probe`.
      options: What is measured.
      other_python: A Python with pfl-research and PyTorch; without, they are left out.
    """
    cohort = _cohort(options.quick)
    name, make_data = _make_data(options.data_dir, cohort)
    arguments = _arguments()
    process, client_data = _process(arguments), make_data()
    client_update = bare.client_update_of("fedavg", *arguments)
    bare_round = bare.build_round(*arguments, client_update, uniform=True)
    with contextlib.ExitStack() as stack:
        tested, local = stack.enter_context(runners(options.runtime, "local"))
        functions = {
            "tested": tested.round(process, client_data),
            "local": local.round(process, client_data),
            "bare": lambda: bare_round(client_data),
            "data": make_data,
        }
        labels = {
            "tested": f"{tested.label} round",
            "local": f"{local.label} round",
            "bare": "bare tf.function",
            "data": "building the datasets",
        }
        for key, command in _others(script, options, other_python, cohort).items():
            request = stack.enter_context(processes.process(command))
            labels[key] = request("versions")
            functions[key] = functools.partial(request, "round")
        seconds = in_turn(functions, options.repeats)
    cores = len(os.sched_getaffinity(0))
    size = f"{cohort} of {_CLIENTS:,} clients, {name}, {cores} core{'s' * (cores > 1)}"
    for a, b, goal in (
        ("tested", "bare", Goal(1.1)),
        ("tested", "local", None),
        ("local", "bare", None),
        ("data", "tested", None),
        ("trainer", "tested", None),
        ("trainer", "pfl", Goal(0.9)),
    ):
        if a in seconds and b in seconds:
            table.add(size, labels[a], labels[b], "s", seconds[a], seconds[b], goal)


def _others(
    script: str, options: setup.Options, other_python: str | None, cohort: int
) -> dict[str, list[str]]:
    """The commands of the processes that answer requests for rounds, too."""
    trainer = [sys.executable, script, "--probe=pfl,0,0"]
    trainer += ["--quick"] if options.quick else []
    trainer += [f"--data_dir={options.data_dir}"] if options.data_dir else []
    commands = {"trainer": trainer}
    if other_python is not None:
        research = pathlib.Path(__file__).with_name("pfl_research.py")
        commands["pfl"] = [other_python, str(research), str(cohort)]
    return commands
