"""The local loop that every method runs on a client, and the steps that methods share.

A step is a function `(weights, batch, step_num) -> Step`; `run` takes one optimizer step for each
batch of a dataset and sums the steps' counts and metrics.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tff_fedlabel._autograph import as_written, given
from tff_fedlabel._lazy import tf, tff
from tff_fedlabel.algorithms import _method, _views


class Step(NamedTuple):
    """What a method computes from one batch.

    Attributes:
      gradients: The gradients for the optimizer, a tuple like the weights.
      num_examples: float32 [], the number of images of the batch that took part.
      metrics: `OrderedDict` name -> `(total,)` or `(numerator, denominator)`, float32 scalars.
      logits: Of labelled images, the logits; with `labels` and `loss` they give the model's own
        metrics. Else None.
      labels: Of labelled images, their labels; else None.
      loss: Of labelled images, their loss; else None.
      any_labeled: Where a batch may have no labelled image, bool [], whether there is one; the
        model's own metrics pass over batches that have none. None where each batch has some.
    """

    gradients: Any
    num_examples: tf.Tensor
    metrics: collections.OrderedDict
    logits: Any = None
    labels: Any = None
    loss: Any = None
    any_labeled: Any = None


class Trained(NamedTuple):
    """What `run` returns.

    Attributes:
      weights: The trainable weights after the last step, a tuple.
      num_examples: float32 [], summed over the steps.
      metrics: The steps' metrics summed, in the same structure.
      model_metrics: The unfinalized metrics of the model over the labelled batches.
      carried: What `after_step` returned last, or what was given.
    """

    weights: Any
    num_examples: tf.Tensor
    metrics: collections.OrderedDict
    model_metrics: Any
    carried: Any = ()


def run(
    setup: _method.Setup,
    hparams: Any,
    step: Callable[[Any, Any, tf.Tensor], Step],
    weights: tuple[tf.Tensor, ...],
    dataset: tf.data.Dataset,
    *,
    carried: Any = None,
    after_step: Callable[[Any, Any], Any] | None = None,
) -> Trained:
    """Takes one optimizer step for each batch of `dataset`, from fresh optimizer state.

    Args:
      setup: What the process is built from; its optimizer is the client's (learning rate eta).
      hparams: The optimizer's hyper-parameters of this round.
      step: The method's step, traced once.
      weights: The trainable weights to start from.
      dataset: Batches; their number is the number of local steps (tau or tau').
      carried: A structure of tensors of known shapes that goes from step to step, such as a
        teacher's weights; where given, `step` gets it as its fourth argument.
      after_step: `(weights, carried) -> carried`, after each optimizer step; with `carried` only.

    Returns:
      The trained weights and the sums; without a batch, the weights as given and zeros.
    """
    model, optimizer = setup.model, setup.optimizer
    specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights)
    more = () if carried is None else (carried,)
    spec_of_more = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), more)
    # Traced separately to know the structure of the metrics before the loop begins.
    traced = tf.function(step).get_concrete_function(
        specs, dataset.element_spec, tf.TensorSpec([], tf.int32), *spec_of_more
    )
    outputs = traced.structured_outputs
    counts = (outputs.num_examples, outputs.metrics)
    zeros = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), counts)

    def next_carry(carry, batch):
        step_num, optimizer_state, weights, totals, model_metrics, more = carry
        done = traced(weights, batch, step_num, *more)
        optimizer_state, weights = optimizer.next(optimizer_state, weights, done.gradients)
        totals = tf.nest.map_structure(tf.add, totals, (done.num_examples, done.metrics))
        model_metrics = updated_metrics(model, model_metrics, done)
        if after_step is not None:
            more = (after_step(weights, *more),)
        return step_num + 1, optimizer_state, weights, totals, model_metrics, more

    carry = (
        tf.constant(0),
        optimizer.set_hparams(optimizer.initialize(specs), hparams),
        weights,
        zeros,
        model.initialize_metrics_state(),
        more,
    )
    carry = over_batches(setup, dataset, carry, next_carry)
    _, _, weights, (num_examples, metrics), model_metrics, more = carry
    return Trained(weights, num_examples, metrics, model_metrics, *more)


def over_batches(
    setup: _method.Setup,
    dataset: tf.data.Dataset,
    carry: Any,
    next_carry: Callable[[Any, Any], Any],
) -> Any:
    """`carry` after `carry = next_carry(carry, batch)` for each batch, in the loop of the setup."""
    dataset = dataset.with_options(_reading_options())
    if setup.loop_implementation is tff.learning.LoopImplementation.DATASET_ITERATOR:
        for batch in iter(dataset):
            carry = next_carry(carry, batch)
    else:
        carry = dataset.reduce(carry, next_carry)
    return carry


def updated_metrics(model: tff.learning.models.FunctionalModel, metrics: Any, done: Step) -> Any:
    """The unfinalized metrics of the model, with the labelled images of one step, if any, added."""
    if done.logits is None:
        return metrics

    def updated():
        output = tff.learning.models.BatchOutput(
            loss=done.loss, predictions=done.logits, num_examples=_views.batch_size(done.logits)
        )
        return model.update_metrics_state(metrics, labels=done.labels, batch_output=output)

    return (
        updated()
        if done.any_labeled is None
        else tf.cond(done.any_labeled, updated, lambda: metrics)
    )


def _reading_options() -> tf.data.Options:
    """Options with which a client's few batches are read in the thread that trains on them.

    By default TensorFlow rewrites a pipeline and autotunes it while it runs. For a client that
    costs more than it gains, and rounds can stall: destroying an iterator waits for the autotuning
    thread, which sleeps for many seconds at a time.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.threading.private_threadpool_size = 1
    return options


@as_written
def pairs(labeled: tf.data.Dataset, unlabeled: tf.data.Dataset) -> tf.data.Dataset:
    """One batch of each kind for each step, for methods that use both in one step.

    Args:
      labeled, unlabeled: Finite datasets of batches; one of them, or both, may have none.

    Returns:
      Batches `OrderedDict(labeled=, unlabeled=)`, as many as the longer of the two has. Where the
      shorter has no more, its part is a batch of 0 images.
    """
    parts = collections.OrderedDict(labeled=labeled, unlabeled=unlabeled)
    endless = collections.OrderedDict((k, _and_empty_ones(part)) for k, part in parts.items())
    # A `take_while` would need no count, but costs more than a small client's training.
    steps = tf.maximum(_num_batches(labeled), _num_batches(unlabeled))
    return tf.data.Dataset.zip(endless).take(steps)


def _num_batches(batches):
    """int64 []; reads the dataset if it does not know."""
    known = batches.cardinality()
    return tf.cond(
        known >= 0, lambda: known, lambda: batches.reduce(np.int64(0), lambda count, _: count + 1)
    )


def _and_empty_ones(batches):
    """The batches, then batches of 0 images without end."""
    empty = tf.nest.map_structure(
        lambda spec: tf.zeros([0, *spec.shape[1:]], spec.dtype), batches.element_spec
    )
    return batches.concatenate(tf.data.Dataset.from_tensors(empty).repeat())


def labeled_step(
    setup: _method.Setup,
    client: _method.Client,
    proximal_strength: float = 0.0,
    keep: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None,
) -> Callable[[Any, Any, tf.Tensor], Step]:
    """The step on the labelled loss F_L (eq. local_model_update), for `run`.

    With `proximal_strength` mu > 0 the loss gains `mu / 2 ||w - w0||^2`, FedProx's term (Li et
    al., "Federated Optimization in Heterogeneous Networks", 2020), whose gradient is mu (w - w0).
    With `keep`, `(logits, labels) -> bool [b]`, the loss is that of the images for which it holds,
    0 where there is none, and only they take part. Its metric is `labeled_loss`.
    """
    return functools.partial(_labeled_step, setup, client, proximal_strength, keep)


@as_written
def _labeled_step(setup, client, proximal_strength, keep, weights, batch, step_num):
    del step_num  # No randomness.
    model_loss = given(setup.model.loss)
    keep = keep and given(keep)

    def loss_and_logits(weights):
        logits = setup.model.predict_on_batch(
            (weights, client.non_trainable), batch["x"], training=True
        )
        if keep is None:
            return model_loss(output=logits, label=batch["y"]), logits
        kept = keep(logits, batch["y"])
        some = tf.reduce_any(kept)
        rows = kept | ~some  # Never none: the mean of no losses is a NaN.
        loss = model_loss(
            output=tf.boolean_mask(logits, rows), label=tf.boolean_mask(batch["y"], rows)
        )
        return loss * tf.cast(some, loss.dtype), logits

    (loss, logits), gradients = differentiate(loss_and_logits, weights)
    gradients = with_proximal_term(gradients, proximal_strength, weights, client.weights)
    images = tf.cast(_views.batch_size(logits), tf.float32)
    if keep is not None:
        images = tf.reduce_sum(tf.cast(keep(logits, batch["y"]), tf.float32))
    metrics = collections.OrderedDict(labeled_loss=(tf.cast(loss, tf.float32) * images, images))
    return Step(gradients, images, metrics, logits, batch["y"], loss)


def with_proximal_term(gradients: Any, strength: float, weights: Any, received: Any) -> Any:
    """The gradients with that of FedProx's `mu / 2 ||w - w0||^2` added, mu (w - w0).

    Args:
      gradients, weights, received: Tuples of the same form; `received` is w0.
      strength: mu >= 0.
    """
    if strength <= 0:
        return gradients
    return tuple(
        g + tf.cast(strength, g.dtype) * (w - w0)
        for g, w, w0 in zip(gradients, weights, received, strict=True)
    )


def clipped(step: Callable[..., Step], max_norm: float | None) -> Callable[..., Step]:
    """`step` with its gradients scaled down together to a norm of at most `max_norm`, if given."""
    if max_norm is None:
        return step

    def clipped_step(*args):
        done = step(*args)
        gradients, _ = tf.clip_by_global_norm(done.gradients, max_norm)
        return done._replace(gradients=tuple(gradients))

    return clipped_step


def differentiate(loss_fn: Callable[[Any], Any], weights: Any) -> tuple[Any, Any]:
    """`loss_fn(weights)`, and the gradients of it or of its first element w.r.t. the weights.

    The gradients are dense and of known shapes, even for embeddings, and 0 for weights that do not
    affect the loss.
    """
    with tf.GradientTape() as tape:
        tape.watch(weights)
        result = loss_fn(weights)
    loss = result[0] if isinstance(result, tuple) else result
    gradients = tape.gradient(loss, weights, unconnected_gradients="zero")
    gradients = tuple(tf.convert_to_tensor(g) for g in gradients)
    for gradient, weight in zip(gradients, weights, strict=True):
        gradient.set_shape(weight.shape)
    return result, gradients


def mean_over_kept(
    image_losses: Callable[[Any, tf.Tensor], tf.Tensor],
    mask: tf.Tensor,
    weights: Any,
    skip_discarded: bool = True,
) -> tuple[tf.Tensor, Any]:
    """The mean loss of a batch in which only the kept images have a loss, and its gradients.

    Discarded images count as zeros in the mean (eq. unsuploss has 1 / b).

    Args:
      image_losses: `(weights, rows) -> losses`: float32 [k] for k row numbers of the batch.
      mask: bool [b], which images are kept.
      weights: The weights to differentiate with respect to.
      skip_discarded: Whether only the kept rows are computed; the value is the same either way.

    Returns:
      float32 [] and a tuple like `weights`.
    """
    batch_size = tf.size(mask)
    kept = tf.where(mask)[:, 0]

    def loss(weights):
        if skip_discarded:
            losses = image_losses(weights, kept)
        else:
            losses = image_losses(weights, tf.range(batch_size, dtype=tf.int64))
            losses = tf.where(mask, losses, tf.zeros_like(losses))
        return tf.reduce_sum(losses) / tf.cast(batch_size, tf.float32)

    def nothing_kept():
        return tf.constant(0.0), tuple(tf.zeros_like(w) for w in weights)

    return tf.cond(tf.size(kept) > 0, lambda: differentiate(loss, weights), nothing_kept)
