"""Images as floats in [0, 1] and as 8-bit grey levels, and which of them can be augmented."""

from __future__ import annotations

from tff_fedlabel._lazy import tf

_MIN_SIDE, _MAX_SIDE = 8, 256  # up to 256 px every sum over an image's levels stays exact


def to_float(images):
    """Converts images to float32.

    Args:
      images: any shape. uint8 in 0..255 is divided by 255; floating point is only cast.

    Returns:
      float32, same shape.

    Raises:
      ValueError: if the dtype is neither uint8 nor floating point.
    """
    images = tf.convert_to_tensor(images)
    _check_dtype("images", images.dtype)
    if images.dtype == tf.uint8:
        return from_levels(images)
    return tf.cast(images, tf.float32)


def from_float(images, dtype):
    """Converts float images in [0, 1] to the dtype a model takes; the inverse of `to_float`.

    Args:
      images: floating point in [0, 1], any shape.
      dtype: tf.uint8 (0..255, rounded; values outside [0, 1] become 0 or 255, and NaN becomes 0)
        or a floating point dtype (only cast, NaN and values outside [0, 1] included).

    Returns:
      Images of `dtype`, same shape.

    Raises:
      ValueError: if `images` are not floating point or `dtype` is neither of the two.
    """
    images = tf.convert_to_tensor(images)
    dtype = tf.as_dtype(dtype)
    if not images.dtype.is_floating:
        raise ValueError(f"images must be floating point in [0, 1], got {images.dtype.name}.")
    _check_dtype("dtype", dtype)
    if dtype != tf.uint8:
        return tf.cast(images, dtype)
    levels = tf.clip_by_value(tf.round(tf.cast(images, tf.float32) * 255.0), 0.0, 255.0)
    # A cast of NaN to an integer is undefined.
    return tf.cast(tf.where(tf.math.is_nan(levels), 0.0, levels), tf.uint8)


def check_shape(shape):
    """Returns (height, width, channels) of a batch's shape; raises `ValueError` if unfit.

    Args:
      shape: `tf.TensorShape`, or what converts to one: [batch, height, width, channels], the batch
        size known or not.
    """
    shape = tf.TensorShape(shape)
    if shape.rank != 4 or None in shape.as_list()[1:]:
        raise ValueError(
            "images must be [batch, height, width, channels] with all but the batch size known, "
            f"got shape {shape}."
        )
    _, height, width, channels = shape
    if not all(_MIN_SIDE <= side <= _MAX_SIDE for side in (height, width)):
        raise ValueError(
            f"images must have sides of {_MIN_SIDE} to {_MAX_SIDE} pixels, got {height}x{width}."
        )
    if channels not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels, got {channels}.")
    return height, width, channels


def check_data(shape, dtype):
    """Raises `ValueError` unless `to_float` makes images of such data that can be augmented."""
    _check_dtype("images", tf.as_dtype(dtype))
    return check_shape(shape)


def float_images(images):
    """Returns a batch as a float32 tensor, after the checks of its dtype and shape."""
    images = tf.convert_to_tensor(images)
    if images.dtype != tf.float32:
        raise ValueError(
            f"images must be float32 in [0, 1], got {images.dtype.name}; convert with "
            "augmentation.to_float."
        )
    check_shape(images.shape)
    return images


def to_levels(images):
    """Whole grey levels 0..255 in float32 of images in [0, 1], halves up."""
    return tf.clip_by_value(tf.floor(images * 255.0 + 0.5), 0.0, 255.0)


def from_levels(levels):
    """Float32 images in [0, 1] of grey levels 0..255 of any dtype."""
    # Not `levels / 255`: graph optimisation turns that into a float32 multiplication, whose last
    # bit differs from eager mode. Through float64 the result is the correctly rounded quotient.
    return tf.cast(tf.cast(levels, tf.float64) * (1 / 255), tf.float32)


def _check_dtype(field, dtype):
    if dtype != tf.uint8 and not dtype.is_floating:
        raise ValueError(
            f"{field} must be uint8 in 0..255 or floating point in [0, 1], got {dtype.name}."
        )
