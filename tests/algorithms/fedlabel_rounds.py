"""Whole FedLabel rounds, and what float64 NumPy makes of them."""

import functools

import numpy as np
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client, to_tff
from weights import assert_weights_close

from tff_fedlabel.algorithms import FedLabelConfig, build_fedlabel

sgd = tff.learning.optimizers.build_sgdm

COHORT = [random_client(1), random_client(2, labeled=3, unlabeled=9), random_client(3, 8, 5)]
TWO_ROUNDS = [COHORT, [random_client(4), random_client(5, 5, 20)]]


def start():
    """The first weights as float32 has them, in float64."""
    return [np.float64(np.float32(w)) for w in initial_weights()]


@functools.cache
def _build(config, optimizer, tail):
    return build_fedlabel(
        build_model(initial_weights()), sgd(**dict(optimizer)), config, **dict(tail)
    )


def build(*, learning_rate=0.3, momentum=None, tail=None, **config):
    """A process on the linear model; one that was built, and compiled, serves again."""
    config.setdefault("strong_augment", None)
    optimizer = {"learning_rate": learning_rate, "momentum": momentum}
    tail = {"loop_implementation": tff.learning.LoopImplementation.DATASET_ITERATOR, **(tail or {})}
    return _build(FedLabelConfig(**config), tuple(optimizer.items()), tuple(tail.items()))


def run(process, cohorts, hidden=None, weights=None):
    """Runs one round per cohort; returns the weights and the metrics of the last round.

    It starts from `weights`, or from those of the process.
    """
    state = process.initialize()
    if weights is not None:
        first = tff.learning.models.ModelWeights(tuple(np.float32(w) for w in weights), ())
        state = process.set_model_weights(state, first)
    for cohort in cohorts:
        output = process.next(state, [to_tff(client, hidden) for client in cohort])
        state = output.state
    weights = process.get_model_weights(state).trainable
    return [np.asarray(w) for w in weights], output.metrics["client_work"]["train"]


def check_rounds(reference, cohorts, weights=None, **build_arguments):
    actual, metrics = run(build(**build_arguments), cohorts, weights=weights)
    first = expected = start() if weights is None else weights
    for cohort in cohorts:
        expected, used = reference.round(expected, cohort)
    assert_weights_close(actual, expected)
    assert metrics["images_used"] == sum(used)
    # The reference itself moved, or the comparison would say nothing.
    assert max(np.abs(e - w).max() for e, w in zip(expected, first, strict=True)) > 1e-2
    return metrics


def negative(images, *, seed):
    del seed
    return 1.0 - images
