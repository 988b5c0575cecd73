"""A round of any method without TFF, and what the runtime adds to it."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from benchmarks import bare, harness, setup

from costs import timing
from costs.subject import Before, Size, Subject
from tff_fedlabel import algorithms

_CLIENTS = 4
_LIMIT = 1.15


def method_rounds(table: harness.Table, options: setup.Options) -> None:
    """Each method's round in a runtime against the same tensor operations in one `tf.function`."""
    steps, names = (10, list(algorithms.METHODS))
    if options.quick:
        steps, names = 2, ["fedlabel", "semifl"]
    size = Size(32, steps, steps, width=16)
    for name in names:
        subject = Subject(name, size)
        # A runtime for each, so that the memory of one method does not slow down the next.
        with harness.runners(options.runtime) as (tested,):
            before = subject.before(tested)
            functions = {
                tested.label: timing.one_round(subject, before, _CLIENTS, tested),
                "bare": build_round(subject, before, _CLIENTS),
            }
            initial = before.state.global_model_weights.trainable
            bare.check_same(initial, *(function() for function in functions.values()))
            seconds = harness.in_turn(functions, options.repeats)
        table.add(
            f"CNN, {_CLIENTS} clients, {steps}+{steps} steps of {size.batch_size}, {name}",
            f"{tested.label} round",
            "bare tf.function",
            "s",
            seconds[tested.label],
            seconds["bare"],
            harness.Goal(_LIMIT),
        )


def build_round(subject: Subject, before: Before, clients: int):
    """A function without arguments that returns the weights after the measured round.

    It does the tensor operations of `process.next`, one client after the other: every client's
    update, the weighted mean or the method's own aggregation, the server's step, its state and its
    training. It leaves out what makes the round robust (updates that are not finite) and what
    clients are to remember, so it is the least a round can take.
    """
    method, model_setup = subject.method, subject.setup
    received = before.state.global_model_weights
    weights = tuple(tf.convert_to_tensor(w) for w in received.trainable)
    non_trainable = tuple(tf.convert_to_tensor(w) for w in received.non_trainable)
    server_state = _tensors(before.state.client_work.get("method", ()))
    hparams = _tensors(before.state.client_work["optimizer"])
    aggregations = tf.nest.flatten(_tensors(before.state.aggregator))
    server_optimizer = tff.learning.optimizers.build_sgdm(1.0, momentum=method.server_momentum)
    optimizer_state, training = before.state.finalizer, None
    if method.server_training is not None:
        optimizer_state, training = optimizer_state["finalizer"], optimizer_state["training"]
        training = _tensors(training)
    optimizer_state = _tensors(optimizer_state)
    data_of_a_client = subject.client_data(before.memories)
    specs = collections.OrderedDict((k, d.element_spec) for k, d in data_of_a_client.items())

    @tf.function
    def one_client(weights, variants):
        data = {
            k: tf.data.experimental.from_variant(v, specs[k])
            for k, v in zip(specs, variants, strict=True)
        }
        client = subject.client(data, weights, server_state, hparams)
        output = method.client_update(model_setup, client)
        weight = output.num_examples
        if method.uniform_mean:
            weight = tf.cast(weight > 0, tf.float32)
        return (
            output.delta,
            weight,
            output.sent,
            output.model_metrics,
            output.metrics,
            output.memory,
        )

    @tf.function
    def one_round(weights, variants):
        outputs = []
        for client in range(clients):
            # One after the other.
            with tf.control_dependencies(tf.nest.flatten(outputs[-1:])):
                outputs.append(one_client(weights, tuple(v[client] for v in variants)))
        deltas, counts, sent, *metrics, memories = zip(*outputs, strict=True)
        summed = [_summed(values) for values in metrics]
        state = server_state
        if method.server_state is not None:
            state = method.server_update(model_setup, server_state, _summed(sent))
        if method.aggregate is not None:
            stacked = [tf.nest.map_structure(lambda *a: tf.stack(a), *v) for v in (deltas, sent)]
            sent_by_all = algorithms.Clients(
                stacked[0], tf.stack(counts), stacked[1], aggregations[0]
            )
            delta = method.aggregate(model_setup, sent_by_all)
        else:
            weighted = [tuple(c * d for d in ds) for c, ds in zip(counts, deltas, strict=True)]
            total = tf.add_n(counts)
            delta = tuple(tf.math.divide_no_nan(d, total) for d in _summed(weighted))
        gradients = tuple(-d for d in delta)
        _, new = server_optimizer.next(optimizer_state, weights, gradients)
        if method.server_training is not None:
            data = tf.nest.map_structure(tf.constant, subject.server_data())
            round_at_server, hparams_at_server = training["round_num"], training["optimizer"]
            server = algorithms.Server(new, non_trainable, data, round_at_server, hparams_at_server)
            new = method.server_training(model_setup, server).weights
        return new, state, summed, memories

    def run() -> list[np.ndarray]:
        variants = tuple(
            tf.stack([tf.data.experimental.to_variant(data) for _ in range(clients)])
            for data in data_of_a_client.values()
        )
        new, *_ = one_round(weights, variants)
        return [w.numpy() for w in new]

    return run


def _tensors(structure: Any) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, structure)


def _summed(values: Any) -> Any:
    return tf.nest.map_structure(lambda *parts: tf.add_n(parts), *values)
