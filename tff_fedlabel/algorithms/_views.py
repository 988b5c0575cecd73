"""Views of a batch's images, and what a model says of them: what methods that label images share.

Images are one tensor `[batch, ...]`, or a structure of several for a model with such inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tff_fedlabel import augmentation
from tff_fedlabel._autograph import given
from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _method


def augmented(augment: Callable[..., tf.Tensor] | None, images: Any, seed: tf.Tensor) -> Any:
    """The images as `augment` changes them, in the dtype the model takes; None is the identity.

    Args:
      augment: `(images, *, seed) -> images` on float32 images.
      images: As the model takes them.
      seed: int32 [2].
    """
    if augment is None:
        return images
    changed = given(augment)(augmentation.to_float(images), seed=seed)
    return augmentation.from_float(changed, images.dtype)


def logits(
    setup: _method.Setup, client: _method.Client, weights: Any, images: Any, training: bool
) -> tf.Tensor:
    """float32 [batch, classes], the model with `weights` on the images."""
    found = setup.model.predict_on_batch((weights, client.non_trainable), images, training=training)
    return tf.cast(found, tf.float32)


def rows(images: Any, numbers: tf.Tensor) -> Any:
    """The rows of the images that have these numbers."""
    return tf.nest.map_structure(lambda part: tf.gather(part, numbers), images)


def batch_size(images: Any) -> tf.Tensor:
    """int32 []."""
    return tf.shape(tf.nest.flatten(images)[0])[0]


def zero_unless(condition: tf.Tensor, values: Any) -> Any:
    """`values` [b, ...], or a structure of them, with zeros where a condition [b] does not hold.

    For a loss that is computed for all images and then masked: a NaN times 0 is a NaN.
    """

    def zeros_between(part):
        by_row = tf.reshape(condition, [-1] + [1] * (part.shape.rank - 1))
        return tf.where(by_row, part, tf.zeros_like(part))

    return tf.nest.map_structure(zeros_between, values)


def usable(images: Any, *outputs: tf.Tensor) -> tf.Tensor:
    """Which images hold neither a NaN nor an infinity, nor do their outputs [b, ...]; bool [b].

    Others take part in no loss. The images count, too: a model may lose a NaN on its way forward,
    in a maximum for instance, and meet it again in the gradient.
    """
    first, *others = (_finite_rows(part) for part in (*tf.nest.flatten(images), *outputs))
    return functools.reduce(tf.logical_and, others, first)


def of_usable_rows(compute: Callable[[tf.Tensor], tuple[tf.Tensor, Any]], rows: tf.Tensor) -> Any:
    """What `compute` gives for those rows of a batch that it finds usable itself.

    Which these are is known only from outputs that it differentiates. So it is run again without
    the others; mostly there are none. It is traced once and never sees 0 rows.

    Args:
      compute: `(rows) -> (usable, results)`: of some row numbers, which of them are usable, bool
        [k], and a structure of tensors of known shapes.
      rows: int64 [n], the rows to begin with.

    Returns:
      `results` for usable rows only; zeros if there are none.
    """
    traced = tf.function(compute, autograph=False)
    traced = traced.get_concrete_function(tf.TensorSpec([None], tf.int64))
    _, results = traced.structured_outputs
    zeros = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), results)

    def is_left(rows, done, _):
        return ~done & (tf.size(rows) > 0)

    def run(rows, *_):
        found, results = traced(rows)
        return tf.boolean_mask(rows, found), tf.reduce_all(found), results

    _, done, results = tf.while_loop(
        is_left,
        run,
        (rows, tf.constant(False), zeros),
        shape_invariants=(
            tf.TensorShape([None]),
            tf.TensorShape([]),
            tf.nest.map_structure(lambda t: t.shape, zeros),
        ),
    )
    return tf.cond(done, lambda: results, lambda: zeros)


def _finite_rows(values):
    """Which rows of [b, ...] hold neither a NaN nor an infinity, bool [b]."""
    if not values.dtype.is_floating:
        return tf.fill(tf.shape(values)[:1], True)
    return tf.reduce_all(tf.math.is_finite(values), axis=range(1, values.shape.rank))


def count(condition: tf.Tensor) -> tf.Tensor:
    """How often a condition holds, float32 []."""
    return tf.reduce_sum(tf.cast(condition, tf.float32))
