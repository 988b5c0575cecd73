"""A federated program of TFF's that takes a moment, on small images.

As a script, `python small_program.py FOLDER`, it runs until it is killed or done.
"""

import asyncio
import functools
import pathlib
import sys

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import tff_fedlabel
from tff_fedlabel import models, runtime
from tff_fedlabel.datasets import federated
from tff_fedlabel.training import programs

SHAPE, CLASSES, CLIENTS = (4, 4, 1), 3, 6
ROUNDS, EVERY, CLIENTS_PER_ROUND = 8, 2, 3
OPTIONS = {"labeled_steps": 2, "unlabeled_steps": 2, "batch_size": 4, "seed": 3}


def make_clients(seed=0, all_labeled=False, images=60):
    rng = np.random.default_rng(seed)
    return federated.from_arrays(
        rng.integers(0, 256, (images, *SHAPE)).astype(np.uint8),
        rng.integers(0, CLASSES, images),
        np.arange(images) % CLIENTS,
        np.full(images, True) if all_labeled else np.arange(images) // CLIENTS % 2 == 0,
        num_classes=CLASSES,
    )


@functools.cache
def make_model():
    def build_keras():
        return tf.keras.Sequential(
            [
                tf.keras.layers.Input(SHAPE),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(CLASSES, kernel_initializer=tf.keras.initializers.Zeros()),
            ]
        )

    return models.functional_model(build_keras, input_shape=SHAPE)


@functools.cache
def fed_eval():
    return tff.learning.algorithms.build_fed_eval(make_model())


@functools.cache
def make_process(**options):
    return tff_fedlabel.build_fedlabel(
        make_model(),
        tff.learning.optimizers.build_sgdm(0.1),
        tff_fedlabel.FedLabelConfig(strong_augment=None, threshold=0.3),
        **options,
    )


def state_manager(folder):
    return programs.ProgramStateManager(str(pathlib.Path(folder) / "states"))


def run(folder, rounds=ROUNDS):
    """Trains until `rounds` are done, or on from what lies in the folder."""
    folder = pathlib.Path(folder)
    evaluations = programs.EvaluationManager(
        source=make_clients(1, all_labeled=True, images=30).evaluation_source(batch_size=4),
        build_process=fed_eval,
        state_dir=folder / "evaluations",
        metrics_manager=tff.program.CSVFileReleaseManager(str(folder / "evaluations.csv")),
        cohort_size=CLIENTS,
    )
    with runtime.use("device", asynchronous=True):
        asyncio.run(
            tff.learning.programs.train_model(
                train_process=make_process(),
                train_data_source=make_clients().data_source(**OPTIONS),
                train_per_round_clients=CLIENTS_PER_ROUND,
                train_total_rounds=rounds,
                program_state_manager=state_manager(folder),
                model_output_manager=tff.program.SavedModelFileReleaseManager(
                    str(folder / "model")
                ),
                train_metrics_manager=programs.InOrder(
                    tff.program.CSVFileReleaseManager(str(folder / "rounds.csv")),
                    tff.program.LoggingReleaseManager(),
                    tff.program.TensorBoardReleaseManager(str(folder / "tensorboard")),
                ),
                evaluation_manager=evaluations,
                evaluation_periodicity=EVERY,
            )
        )


if __name__ == "__main__":
    run(sys.argv[1])
