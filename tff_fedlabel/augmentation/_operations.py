"""RandAugment's 14 operations on batches of 8-bit grey levels.

**Arithmetic.** RandAugment is defined on 8-bit images (Pillow's operations). Here images are held
as whole grey levels 0..255 in float32, and every operation is arranged so that all intermediate
values are exact in float32 or are rounded well away from a tie. A runtime that sums in another
order, fuses a multiply with an add, or replaces a division by a multiplication therefore cannot
change a single pixel, and a batch is processed with ordinary float kernels on any device.

**keras-cv.** AutoContrast and Solarize are the pixel functions of keras-cv's layers, and the five
geometric operations share one call of the TensorFlow operation that its geometric layers use, with
a matrix per image. The others are written out here, since keras-cv means something else by the name
(its brightness adds a constant, its contrast works per channel, its equalisation takes its step
from another histogram bin than Pillow's), fixes the parameter per layer (posterise), or uses a
float convolution or matrix product, whose last bit depends on the runtime (sharpness, colour).
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import types

import numpy as np

from tff_fedlabel._lazy import tf

OPERATIONS = (
    "Identity",
    "AutoContrast",
    "Equalize",
    "Rotate",
    "Solarize",
    "Color",
    "Posterize",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
)
"""Names of the 14 operations, in the order the paper lists them."""

MAX_MAGNITUDE = 30.0
"""Upper end of RandAugment's magnitude scale."""

_GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
_BLEND_STEPS = 4096  # enhancement factors are multiples of 1/4096, so that blending is exact
_MATRIX_STEPS = 256  # matrix entries are multiples of 1/256: 8 bits + 8 bits + 8-bit levels = 24


def grouped_operations(magnitude, height, width, channels):
    """Returns a function that takes each image through its own operation.

    Images with the same operation are gathered and go through it together, which is what makes
    this faster than one image at a time.

    Args:
      magnitude: a float in [0, MAX_MAGNITUDE], the same for all.
      height, width, channels: of the images.

    Returns:
      `apply(levels, operation, sign) -> levels`, with grey levels float32 [batch, height, width,
      channels], `operation` int32 [batch], an index into OPERATIONS, and `sign` float32 [batch], 1
      or -1.
    """
    strength = magnitude / MAX_MAGNITUDE
    blend = functools.partial(_blend, strength=strength)
    kernels = {
        ("Identity",): lambda levels, operation, sign: levels,
        ("AutoContrast",): _auto_contrast,
        ("Equalize",): _equalize,
        ("Solarize",): functools.partial(_solarize, threshold=256.0 * (1 - strength)),
        ("Color",): functools.partial(blend, degenerate=_grey),
        ("Posterize",): functools.partial(_posterize, bits=8 - math.floor(4 * strength + 0.5)),
        ("Contrast",): functools.partial(blend, degenerate=_mean_grey),
        ("Brightness",): functools.partial(blend, degenerate=tf.zeros_like),
        ("Sharpness",): functools.partial(blend, degenerate=_smooth),
        _GEOMETRIC: functools.partial(_transform, matrices=_matrices(strength, height, width)),
    }
    group_of = {name: group for group, names in enumerate(kernels) for name in names}
    if channels == 1:
        group_of["Color"] = group_of["Identity"]
    groups = tf.constant([group_of[name] for name in OPERATIONS])

    def apply(levels, operation, sign):
        group = tf.gather(groups, operation)
        rows = tf.dynamic_partition(tf.range(tf.shape(levels)[0]), group, len(kernels))
        results = [
            kernel(tf.gather(levels, row), tf.gather(operation, row), tf.gather(sign, row))
            for kernel, row in zip(kernels.values(), rows, strict=True)
        ]
        return tf.ensure_shape(tf.dynamic_stitch(rows, results), levels.shape)

    return apply


# Each of the following takes `levels`, `operation` and `sign` of a group of images, which may be
# empty, and returns levels.


@functools.cache
def _keras_cv_layers():
    """`keras_cv.layers`, imported late and quietly: it takes seconds and prints its backend."""
    with contextlib.redirect_stdout(io.StringIO()):
        from keras_cv import layers
    return layers


# What the pixel functions of keras-cv's layers read from `self`. Making the layers themselves would
# also make a random generator, that is a variable, and TFF cannot run a graph that holds one.
_LAYER = types.SimpleNamespace(value_range=(0, 255), compute_dtype="float32")


def _auto_contrast(levels, operation, sign):
    del operation, sign
    stretched = _keras_cv_layers().AutoContrast.augment_images(_LAYER, levels)
    # keras-cv multiplies by a rounded scale, so an exact half may come out just below. Its error
    # stays below 0.0012, and whatever is not a half is at least 0.0019 away from one.
    return tf.floor(stretched + 0.5015)


def _solarize(levels, operation, sign, *, threshold):
    del operation, sign
    parameters = {"thresholds": threshold, "additions": 0.0}
    return _keras_cv_layers().Solarization.augment_images(_LAYER, levels, parameters)


def _posterize(levels, operation, sign, *, bits):
    del operation, sign
    step = 2.0 ** (8 - bits)
    return tf.floor(levels * (1 / step)) * step


def _equalize(levels, operation, sign):
    """Pillow's histogram equalisation, each channel of each image by itself."""
    del operation, sign
    _, height, width, channels = levels.shape
    batch = tf.shape(levels)[0]
    # One histogram of 256 bins for each channel of each image, laid end to end.
    offsets = 256 * tf.reshape(tf.range(batch * channels), [batch, 1, 1, channels])
    bins = tf.cast(levels, tf.int32) + offsets
    size = batch * channels * 256
    flat = tf.reshape(bins, [-1])
    # Not tf.math.bincount: TensorFlow refuses it on a GPU that has to be deterministic. Whole
    # numbers have the same sum in any order.
    histograms = tf.math.unsorted_segment_sum(tf.ones_like(flat), flat, size)
    histograms = tf.reshape(histograms, [batch * channels, 256])
    below = tf.cumsum(histograms, axis=1, exclusive=True)
    # The number of pixels below the brightest level that occurs, shared out over 255 steps.
    below_last = tf.where(below < height * width, below, 0)
    step = tf.reduce_max(below_last, axis=1, keepdims=True) // 255
    table = tf.minimum((step // 2 + below) // tf.maximum(step, 1), 255)
    table = tf.where(step > 0, table, tf.range(256))
    return tf.cast(tf.gather(tf.reshape(table, [-1]), bins), tf.float32)


def _blend(levels, operation, sign, *, strength, degenerate):
    del operation
    change = round(0.9 * strength * _BLEND_STEPS)
    factor = _BLEND_STEPS + change * sign[:, tf.newaxis, tf.newaxis, tf.newaxis]
    total = levels * factor + degenerate(levels) * (_BLEND_STEPS - factor)
    rounded = tf.floor((total + _BLEND_STEPS / 2) * (1 / _BLEND_STEPS))
    return tf.clip_by_value(rounded, 0.0, 255.0)


def _grey(levels):
    """Luminance, [group, height, width, 1]: Pillow's 16-bit integer weights (ITU-R 601)."""
    if levels.shape[-1] == 1:
        return levels
    red, green, blue = tf.split(levels, 3, axis=-1)
    return tf.floor((19595.0 * red + 38470.0 * green + 7471.0 * blue + 32768.0) * (1 / 65536))


def _mean_grey(levels):
    """The mean luminance rounded to a level, [group, 1, 1, 1]."""
    pixels = levels.shape[1] * levels.shape[2]
    total = tf.cast(tf.reduce_sum(_grey(levels), axis=[1, 2], keepdims=True), tf.int32)
    return tf.cast((2 * total + pixels) // (2 * pixels), tf.float32)


def _smooth(levels):
    """Pillow's SMOOTH filter: 3x3, weight 5 in the middle and 1 around, the border unchanged."""
    rows = levels[:, :-2] + levels[:, 1:-1] + levels[:, 2:]
    inner = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4.0 * levels[:, 1:-1, 1:-1]
    # round(inner / 13): 2 inner + 13 is odd, so never near a multiple of 26.
    inner = tf.floor((2.0 * inner + 13.0) / 26.0)
    middle = tf.concat([levels[:, 1:-1, :1], inner, levels[:, 1:-1, -1:]], axis=2)
    return tf.concat([levels[:, :1], middle, levels[:, -1:]], axis=1)


def _matrices(strength, height, width):
    """Matrices of the geometric operations: float32 [14, 2, 8], by operation and sign (-, +).

    A row [a, b, c, d, e, f, 0, 0] reads output pixel (x, y) from input (ax + by + c, dx + ey + f).
    """
    matrices = np.tile([1.0, 0, 0, 0, 1, 0, 0, 0], (len(OPERATIONS), 2, 1))
    centre_x, centre_y = (width - 1) / 2, (height - 1) / 2
    for column, sign in enumerate((-1, 1)):
        angle = math.radians(30 * strength) * sign
        linear = _round_to_step(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        )
        # The centre stays where it is, whatever the rounding did to the angle.
        shift = np.array([centre_x, centre_y]) - linear @ [centre_x, centre_y]
        matrices[OPERATIONS.index("Rotate"), column, :6] = np.column_stack([linear, shift]).ravel()
        # Half a shear: the corner of the image is half a pixel from the corner pixel's middle.
        shear = 0.3 * strength * sign
        matrices[OPERATIONS.index("ShearX"), column, [1, 2]] = shear, shear / 2
        matrices[OPERATIONS.index("ShearY"), column, [3, 5]] = shear, shear / 2
        matrices[OPERATIONS.index("TranslateX"), column, 2] = 0.45 * strength * sign * width
        matrices[OPERATIONS.index("TranslateY"), column, 5] = 0.45 * strength * sign * height
    return _round_to_step(matrices).astype(np.float32)


def _round_to_step(values):
    return np.round(np.asarray(values) * _MATRIX_STEPS) / _MATRIX_STEPS


def _transform(levels, operation, sign, *, matrices):
    column = tf.cast(sign > 0, tf.int32)
    chosen = tf.gather_nd(matrices, tf.stack([operation, column], axis=1))
    warped = tf.raw_ops.ImageProjectiveTransformV3(
        images=levels,
        transforms=chosen,
        output_shape=levels.shape[1:3],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
    )
    return tf.floor(warped + 0.5)
