"""Accuracy and loss on validation and test images."""

import concurrent.futures
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

# Small, since a signal waits for the end of a batch.
_BATCH = 100


def evaluate(
    model: tff.learning.models.FunctionalModel, weights: Any, examples: Any
) -> tuple[float, float]:
    """Accuracy and mean loss of `weights` on `examples`.

    Args:
      model: Outputs logits `[batch, classes]`.
      weights: `tff.learning.models.ModelWeights`.
      examples: `datasets.sources.Examples`, x `[n, h, w, c]` and y integers `[n]`.

    Returns:
      Accuracy in [0, 1] and loss in nats, NaN without examples.
    """
    model_weights = (tuple(weights.trainable), tuple(weights.non_trainable))
    evaluate_batch = _batch_function(model, _specs(model_weights), _images_spec(examples.x))

    def of_batch(start):
        # Batch by batch, since the images may be on disk and more than fit in memory.
        with tf.device("/device:CPU:0"):  # Where they go on from here is the model's choice.
            x = tf.constant(np.asarray(examples.x[start : start + _BATCH]))
            y = tf.constant(np.asarray(examples.y[start : start + _BATCH], np.int32))
        return len(y), *evaluate_batch(model_weights, x, y)

    correct = loss = count = 0.0
    for size, batch_correct, batch_loss in _on_all_cores(of_batch, range(0, len(examples), _BATCH)):
        correct, loss, count = correct + batch_correct, loss + batch_loss * size, count + size
    return (float(correct) / count, float(loss) / count) if count else (math.nan, math.nan)


@functools.lru_cache(maxsize=4)
def _batch_function(model, weight_specs, image_spec):
    """(weights, x, y) -> (hits, mean loss), traced once for batches of all sizes."""

    @tf.function(input_signature=(weight_specs, image_spec, tf.TensorSpec([None], tf.int32)))
    def evaluate_batch(model_weights, x, y):
        logits = model.predict_on_batch(model_weights, x, training=False)
        hits = tf.equal(tf.argmax(logits, axis=-1, output_type=y.dtype), y)
        return tf.reduce_sum(tf.cast(hits, tf.float32)), model.loss(output=logits, label=y)

    # Not the `tf.function`, which warns of many models as if one were traced too often.
    return evaluate_batch.get_concrete_function()


@functools.lru_cache(maxsize=4)
def _logits_function(model, weight_specs, image_spec):
    """(weights, x) -> logits, traced once for batches of all sizes."""

    @tf.function(input_signature=(weight_specs, image_spec))
    def logits_of_batch(model_weights, x):
        return model.predict_on_batch(model_weights, x, training=False)

    return logits_of_batch.get_concrete_function()


def _specs(model_weights):
    return tf.nest.map_structure(lambda w: tf.TensorSpec(w.shape, w.dtype), model_weights)


def _images_spec(x):
    return tf.TensorSpec([None, *x.shape[1:]], x.dtype)


def logits_of(
    model: tff.learning.models.FunctionalModel, weights: Any, batches: Iterable[np.ndarray]
) -> Iterator[np.ndarray]:
    """Yields the logits of each batch in turn, float32 `[batch, classes]`.

    Args:
      model: Outputs logits `[batch, classes]`.
      weights: `tff.learning.models.ModelWeights`.
      batches: Images, uint8 `[batch, h, w, c]`, read as they are needed.
    """
    model_weights = (tuple(weights.trainable), tuple(weights.non_trainable))
    specs = _specs(model_weights)

    def of_batch(x):
        x = np.asarray(x)
        return _logits_function(model, specs, _images_spec(x))(model_weights, tf.constant(x))

    for logits in _on_all_cores(of_batch, batches):
        yield logits.numpy()


def _on_all_cores(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """`map(function, items)`, with one item for each core read and computed at a time.

    Several at once, since an operation may be limited to one core: `runtime.device.share_cores`.
    """
    items, cores = iter(items), len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        while some := list(itertools.islice(items, cores)):
            yield from pool.map(function, some)


def batches_of(x: np.ndarray) -> Iterator[np.ndarray]:
    """Cuts `[n, ...]` into batches for `logits_of`; the last holds what is left."""
    for start in range(0, len(x), _BATCH):
        yield x[start : start + _BATCH]


def batches_of_images(images: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Stacks images `[h, w, c]` into such batches, as they come."""
    images = iter(images)
    while some := list(itertools.islice(images, _BATCH)):
        yield np.stack(some)


NOT_EVALUATED = dict.fromkeys(
    ("validation_accuracy", "validation_loss", "test_accuracy", "test_loss"), math.nan
)


def evaluations(experiment, state) -> dict[str, float]:
    """Evaluates the model of a state; the keys are those of `NOT_EVALUATED`."""
    weights = experiment.process.get_model_weights(state)
    values = []
    for examples in (experiment.source.validation, experiment.source.test):
        values += evaluate(experiment.model, weights, examples)
    return dict(zip(NOT_EVALUATED, values, strict=True))
