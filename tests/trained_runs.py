"""A run that takes a moment, for tests of what can be done with a run."""

import numpy as np
import tensorflow as tf
from small_run import SMALL

from tff_fedlabel import training

ROUNDS = 4
# Enough for answers that differ from image to image.
CHOICES = {**SMALL, "rounds": ROUNDS, "width": 8, "tau": 20, "lr": 0.2, "labeled_fraction": 0.8}
CHOICES["client_accuracy"] = True


def train(output_dir, algorithm="fedlabel", task="digits", **choices):
    """Trains a small run in this process; returns its summary."""
    # RandAugment takes long to compile.
    plain = {"strong_augment": "none"} if algorithm == "fedlabel" else {}
    config = training.make_config(task, algorithm, **{**CHOICES, **plain, **choices})
    return training.run(config, output_dir, runtime="device")


def checkpoint(output_dir, name=f"round_{ROUNDS}"):
    """Every number of a checkpoint, read without the code under test."""
    saved = tf.saved_model.load(str(output_dir / "checkpoints" / name))()
    return [np.asarray(value) for value in tf.nest.flatten(saved)]
