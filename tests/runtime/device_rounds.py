"""Processes that tests run in several runtimes, and how they compare what comes out."""

import functools

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights

import tff_fedlabel
from tff_fedlabel import algorithms

SGD = tff.learning.optimizers.build_sgdm(0.1)


def in_context(backend):
    return tff.framework.get_context_stack().install(backend.context)


def rounds(backend, process, clients, number=5):
    with in_context(backend):
        state = process.initialize()
        for _ in range(number):
            output = process.next(state, clients)
            state = output.state
        return process.get_model_weights(state), output.metrics


def assert_same(found, expected, rtol=1e-5):
    tf.nest.assert_same_structure(found, expected)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert type(a) is type(b) and np.shape(a) == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@functools.cache
def build_ours(name):
    """A method on the linear model; built once."""
    configs = {
        "fedlabel": tff_fedlabel.FedLabelConfig(strong_augment=None),
        "fedprox": algorithms.FedProxConfig(proximal_strength=0.3),
    }
    return algorithms.ALGORITHMS[name](
        build_model(initial_weights()), SGD, *([configs[name]] if name in configs else [])
    )
