"""A round without TFF: one `tf.function` with a loop over the clients."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel.algorithms import METHODS, Client, Setup, _builder_arguments


def client_update_of(name: str, model, optimizer, config=None) -> Callable:
    """A method's client update `Client -> ClientOutput`: the code that its processes run."""
    method = METHODS[name]
    config = method.config_class() if config is None else config
    loop = tff.learning.LoopImplementation.DATASET_ITERATOR
    return functools.partial(method.client_update, Setup(model, optimizer, config, loop))


def build_round(
    model,
    optimizer,
    client_update: Callable,
    *,
    uniform: bool = False,
) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """A function from the clients' data to the weights after the first round.

    It does the tensor operations of `process.next`: every client's update, the weighted sum of the
    updates, the sums of the metrics, and the server's step with learning rate 1. It leaves out
    what makes the round robust (updates that are not finite), so it is the least a round can take.

    Args:
      model: The `FunctionalModel`.
      optimizer: The client optimizer.
      client_update: From `client_update_of`.
      uniform: Whether the clients count alike.
    """
    x_spec, y_spec = _builder_arguments.input_specs(model)
    labeled_spec = collections.OrderedDict(x=x_spec, y=y_spec)
    unlabeled_spec = collections.OrderedDict(x=x_spec)
    weights, non_trainable = (
        tuple(tf.convert_to_tensor(w) for w in part) for part in model.initial_weights
    )
    specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights)
    hparams = optimizer.get_hparams(optimizer.initialize(specs))

    from_variant = tf.data.experimental.from_variant

    @tf.function
    def one_client(weights, labeled, unlabeled):
        output = client_update(
            Client(
                weights=weights,
                non_trainable=non_trainable,
                labeled=from_variant(labeled, labeled_spec),
                unlabeled=from_variant(unlabeled, unlabeled_spec),
                round_num=tf.constant(0),
                hparams=hparams,
            )
        )
        weight = output.num_examples
        if uniform:
            weight = tf.cast(weight > 0, tf.float32)
        delta = tuple(d * weight for d in output.delta)
        return delta, weight, output.model_metrics, output.metrics

    variant_spec = tf.TensorSpec([], tf.variant)
    zeros = tf.nest.map_structure(
        lambda t: tf.zeros(t.shape, t.dtype),
        one_client.get_concrete_function(specs, variant_spec, variant_spec).structured_outputs,
    )

    variants_spec = tf.TensorSpec([None], tf.variant)

    @tf.function(input_signature=[specs, variants_spec, variants_spec])  # One trace for all sizes.
    def all_clients(weights, labeled, unlabeled):
        totals = zeros
        for k in tf.range(tf.shape(labeled)[0]):
            # One client after the other, as in a loop in Python.
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            with tf.device("CPU"):  # Datasets live there, whatever computes the steps.
                datasets = labeled[k], unlabeled[k]
            client = one_client(weights, *datasets)
            totals = tf.nest.map_structure(tf.add, totals, client)
        delta, weight, model_metrics, metrics = totals
        new = tuple(w + tf.math.divide_no_nan(d, weight) for w, d in zip(weights, delta))  # noqa: B905 (autograph)
        return new, model_metrics, metrics

    def one_round(client_data):
        with tf.device("CPU"):
            labeled, unlabeled = (
                tf.stack([tf.data.experimental.to_variant(data[part]) for data in client_data])
                for part in ("labeled", "unlabeled")
            )
        new, _, _ = all_clients(weights, labeled, unlabeled)
        return [w.numpy() for w in new]

    return one_round


def check_same(initial, weights, others) -> None:
    """Raises `RuntimeError` unless two rounds made the same step, to float rounding."""
    step = max(np.abs(w - w0).max() for w, w0 in zip(weights, initial, strict=True))
    difference = max(np.abs(w - other).max() for w, other in zip(weights, others, strict=True))
    if not difference <= 0.05 * step:
        raise RuntimeError(
            f"the two rounds differ by {difference:.1e} in a step of {step:.1e}: "
            "their times cannot be compared"
        )
