"""Views of a batch's images, and what a model says of them: what methods that label images share.

Images are one tensor `[batch, ...]`, or a structure of several for a model with such inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tff_fedlabel import augmentation
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
    changed = augment(augmentation.to_float(images), seed=seed)
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


def zero_unless(condition: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """`values` [b, ...] with zeros in the rows where a condition [b] does not hold."""
    condition = tf.reshape(condition, [-1] + [1] * (values.shape.rank - 1))
    return tf.where(condition, values, tf.zeros_like(values))


def zero_unless_finite(kept: tf.Tensor, images: Any) -> Any:
    """The images with zeros for those not kept [b] that hold a NaN or an infinity.

    For a loss that is computed for all images and then masked: a NaN times 0 is a NaN.
    """
    return tf.nest.map_structure(lambda part: zero_unless(kept | _finite_rows(part), part), images)


def _finite_rows(values):
    """Which rows of [b, ...] hold neither a NaN nor an infinity, bool [b]."""
    if not values.dtype.is_floating:
        return tf.fill(tf.shape(values)[:1], True)
    return tf.reduce_all(tf.math.is_finite(values), axis=range(1, values.shape.rank))


def count(condition: tf.Tensor) -> tf.Tensor:
    """How often a condition holds, float32 []."""
    return tf.reduce_sum(tf.cast(condition, tf.float32))
