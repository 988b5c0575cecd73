"""The local SGD loop that every method runs on a client, and the labelled phase built on it."""

import collections
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import _reading


def run(
    gradients_fn: Callable[[Any, Any, Any], tuple[Any, Any]],
    weights: tuple[tf.Tensor, ...],
    dataset: tf.data.Dataset,
    totals: Any,
    *,
    optimizer: tff.learning.optimizers.Optimizer,
    hparams: Any,
    loop_implementation: tff.learning.LoopImplementation,
) -> tuple[tuple[tf.Tensor, ...], Any]:
    """Takes one optimizer step for each batch of `dataset`, from fresh optimizer state.

    Args:
      gradients_fn: `(weights, batch, totals) -> (gradients, totals)`; the gradients have the
        structure of `weights`, the totals keep theirs.
      weights: The trainable weights to start from.
      dataset: Batches; their number is the number of local steps (tau or tau').
      totals: A structure of tensors that `gradients_fn` threads through the steps (metrics).
      optimizer: The client optimizer (learning rate eta).
      hparams: Its hyper-parameters for this round, as `optimizer.get_hparams` names them.
      loop_implementation: How the loop over the dataset is written as a graph.

    Returns:
      The weights after the last step and the final totals. Without a batch, both as given.
    """
    specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights)
    optimizer_state = optimizer.set_hparams(optimizer.initialize(specs), hparams)

    def step(carry, batch):
        optimizer_state, weights, totals = carry
        gradients, totals = gradients_fn(weights, batch, totals)
        optimizer_state, weights = optimizer.next(optimizer_state, weights, gradients)
        return optimizer_state, weights, totals

    carry = (optimizer_state, weights, totals)
    dataset = dataset.with_options(_reading.options())
    if loop_implementation is tff.learning.LoopImplementation.DATASET_ITERATOR:
        for batch in iter(dataset):
            carry = step(carry, batch)
    else:
        carry = dataset.reduce(carry, step)
    _, weights, totals = carry
    return weights, totals


def supervised_gradients(
    model: tff.learning.models.FunctionalModel,
    non_trainable: Any,
    initial_weights: tuple[tf.Tensor, ...],
    proximal_strength: float = 0.0,
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """The gradient of the labelled loss F_L (eq. local_model_update) for `run`.

    With `proximal_strength` mu > 0 the loss gains `mu / 2 ||w - w0||^2`, FedProx's term (Li et
    al., "Federated Optimization in Heterogeneous Networks", 2020), whose gradient is mu (w - w0).
    The totals are those of `supervised_totals`.
    """

    def gradients_fn(weights, batch, totals):
        x, y = batch["x"], batch["y"]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits = model.predict_on_batch((weights, non_trainable), x, training=True)
            loss = model.loss(output=logits, label=y)
        gradients = tape.gradient(loss, weights, unconnected_gradients="zero")
        if proximal_strength > 0:
            gradients = tf.nest.map_structure(
                lambda g, w, w0: g + tf.cast(proximal_strength, g.dtype) * (w - w0),
                gradients,
                weights,
                initial_weights,
            )
        num_images = tf.shape(tf.nest.flatten(logits)[0])[0]
        batch_output = tff.learning.models.BatchOutput(
            loss=loss, predictions=logits, num_examples=num_images
        )
        images = tf.cast(num_images, tf.float32)
        return gradients, collections.OrderedDict(
            model=model.update_metrics_state(totals["model"], labels=y, batch_output=batch_output),
            loss=totals["loss"] + tf.cast(loss, tf.float32) * images,
            images=totals["images"] + images,
        )

    return gradients_fn


def supervised_totals(model: tff.learning.models.FunctionalModel):
    """Zero totals for `supervised_gradients`: the model's metrics, summed loss, image count."""
    return collections.OrderedDict(
        model=model.initialize_metrics_state(), loss=tf.constant(0.0), images=tf.constant(0.0)
    )
