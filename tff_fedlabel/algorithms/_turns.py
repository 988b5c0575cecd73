"""Local steps on weights in several parts, as in FedMatch: batch by batch, the parts take turns."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _local_training, _method, _views


def run_in_turns(
    setup: _method.Setup,
    hparams: Any,
    turns: Sequence[tuple[str, Callable[[Any, Any, tf.Tensor], _local_training.Step]]],
    parts: tuple[tuple[tf.Tensor, ...], ...],
    dataset: tf.data.Dataset,
) -> _local_training.Trained:
    """Like `local_training.run`, for several parts, which each pair of batches moves in turn.

    Each part has its own optimizer state. A turn whose images of a batch are none is left out.

    Args:
      setup, hparams: As in `local_training.run`.
      turns: For each part, in their order, which images of a batch move it ("labeled" or
        "unlabeled"), and its step `(parts, images, step_num) -> Step`. It sees all parts as the
        turns before have left them; its gradients are those of its own part.
      parts: The parts to start from, tuples of weights.
      dataset: What `local_training.pairs` returns.

    Returns:
      As of `local_training.run`, with the parts as `weights`.
    """
    model, optimizer = setup.model, setup.optimizer
    specs = tf.nest.map_structure(lambda w: tf.TensorSpec(w.shape, w.dtype), parts)
    traced = [
        tf.function(step).get_concrete_function(
            specs, dataset.element_spec[name], tf.TensorSpec([], tf.int32)
        )
        for name, step in turns
    ]
    counts = tuple(
        (t.structured_outputs.num_examples, t.structured_outputs.metrics) for t in traced
    )
    zeros = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), counts)

    def take(turn, images, step_num, carry):
        states, parts, totals, model_metrics = carry
        done = traced[turn](parts, images, step_num)
        state, part = optimizer.next(states[turn], parts[turn], done.gradients)
        total = tf.nest.map_structure(tf.add, totals[turn], (done.num_examples, done.metrics))
        return (
            _replace(states, turn, state),
            _replace(parts, turn, part),
            _replace(totals, turn, total),
            _local_training.updated_metrics(model, model_metrics, done),
        )

    def take_if_any(turn, images, step_num, carry):
        any_image = _views.batch_size(images) > 0
        return tf.cond(any_image, lambda: take(turn, images, step_num, carry), lambda: carry)

    def next_carry(carry, batch):
        step_num, *rest = carry
        rest = tuple(rest)
        for turn, (name, _) in enumerate(turns):
            rest = take_if_any(turn, batch[name], step_num, rest)
        return step_num + 1, *rest

    def fresh(part):
        return optimizer.set_hparams(optimizer.initialize(part), hparams)

    states = tuple(fresh(part) for part in specs)
    carry = (tf.constant(0), states, parts, zeros, model.initialize_metrics_state())
    carry = _local_training.over_batches(setup, dataset, carry, next_carry)
    _, _, parts, totals, model_metrics = carry
    metrics = collections.OrderedDict(item for _, part in totals for item in part.items())
    number = tf.add_n([number for number, _ in totals])
    return _local_training.Trained(parts, number, metrics, model_metrics)


def _replace(values, index, value):
    return (*values[:index], value, *values[index + 1 :])
