"""Weak and strong image augmentation whose randomness is a pure function of its arguments.

`RandAugment` is the paper's strong augmentation psi (eq:ce, and the paragraph "Effect of
Strong-Augumentation", which lists its 14 operations); `WeakAugment` is the flip and shift that
FixMatch and its relatives use. Both are called as `augment(images, seed=...)`, with a seed of two
integers as TensorFlow's stateless functions take it; `step_seed` makes one from the seed of a run,
the round and the step.

**Randomness.** A TFF client knows neither its id nor a random state, so every draw is an integer
hash of the seed and a fingerprint of the image's pixels. The same two give the same pixels wherever
the image stands in a batch, eagerly or in a graph, in this process or in TFF's C++ worker; equal
images in one batch are therefore augmented alike. No variable and no stateful operation enters the
graph.

**Arithmetic.** RandAugment is defined on 8-bit images (Pillow's operations). Here images are held
as whole grey levels 0..255 in float32, and every operation is arranged so that all intermediate
values are exact in float32 or are rounded well away from a tie. A runtime that sums in another
order, fuses a multiply with an add, or replaces a division by a multiplication therefore cannot
change a single pixel, and a batch is processed with ordinary float kernels on any device.

**keras-cv.** AutoContrast and Solarize are the pixel functions of keras-cv's layers, and the five
geometric operations share one call of the operation under its geometric layers, with a matrix per
image. The others are written out here: keras-cv means something else by the name (its brightness
adds a constant, its contrast works per channel, its equalisation takes its step from another
histogram bin than Pillow's), fixes the parameter per layer (posterise), or uses a float convolution
or matrix product, whose last bit depends on the runtime (sharpness, colour).
"""

import contextlib
import dataclasses
import functools
import io
import math
import numbers
import types

import numpy as np
import tensorflow as tf

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
_MIN_SIDE, _MAX_SIDE = 8, 256  # up to 256 px every sum below stays exact
_BLEND_STEPS = 4096  # enhancement factors are multiples of 1/4096, so that blending is exact
_MATRIX_STEPS = 256  # matrix entries are multiples of 1/256: 8 bits + 8 bits + 8-bit levels = 24


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
    if images.dtype == tf.uint8:
        return _from_levels(images)
    if images.dtype.is_floating:
        return tf.cast(images, tf.float32)
    raise ValueError(
        f"images must be uint8 in 0..255 or floating point in [0, 1], got {images.dtype.name}"
    )


def from_float(images, dtype):
    """Converts float images in [0, 1] to the dtype a model takes; the inverse of `to_float`.

    Args:
      images: float32 in [0, 1], any shape.
      dtype: tf.uint8 (0..255, rounded) or a floating point dtype (cast).

    Returns:
      Images of `dtype`, same shape.
    """
    dtype = tf.as_dtype(dtype)
    if dtype == tf.uint8:
        return tf.cast(tf.round(images * 255.0), tf.uint8)
    return tf.cast(images, dtype)


@dataclasses.dataclass(frozen=True)
class RandAugment:
    """RandAugment (Cubuk et al. 2019): `num_ops` random operations at one magnitude.

    Each image draws, for each of `num_ops` slots, one of the 14 `OPERATIONS` (uniformly, with
    replacement) and a sign, and the slots are applied in turn. With m = magnitude / 30:

    | operation              | at magnitude M                                            | sign |
    |------------------------|-----------------------------------------------------------|------|
    | Identity               | nothing                                                   |      |
    | AutoContrast           | stretch each channel to 0..255; M has no effect           |      |
    | Equalize               | equalise each channel's histogram; M has no effect        |      |
    | Rotate                 | by 30 m degrees about the centre                          | +-   |
    | Solarize               | invert levels >= 256 (1 - m)                              |      |
    | Color                  | blend with its grey version, factor 1 +- 0.9 m;           | +-   |
    |                        | the identity on 1-channel images                          |      |
    | Posterize              | keep the top 8 - round(4 m) bits                          |      |
    | Contrast               | blend with its mean grey level, factor 1 +- 0.9 m         | +-   |
    | Brightness             | blend with black, factor 1 +- 0.9 m                       | +-   |
    | Sharpness              | blend with a smoothed version, factor 1 +- 0.9 m          | +-   |
    | ShearX, ShearY         | by 0.3 m, about the top left corner                       | +-   |
    | TranslateX, TranslateY | by 0.45 m of the width or height                          | +-   |

    Factor 1 is the image itself, 0 its degenerate version; beyond 1 extrapolates. Geometric
    operations interpolate bilinearly and fill with black; entries of their matrices are rounded
    to 1/256 (at most 1/16 pixel at the corner of a 32x32 image). Factors are rounded to 1/4096.
    Each operation rounds its result to 8-bit levels, as Pillow's do; images that are not
    multiples of 1/255 are rounded first.

    Attributes:
      num_ops: operations per image, an int >= 0. 0 returns the images untouched.
      magnitude: strength M in [0, 30].
    """

    num_ops: int = 10
    magnitude: float = 1.0

    def __post_init__(self):
        _check_count("num_ops", self.num_ops)
        _check_magnitude(self.magnitude)

    @classmethod
    def single(cls) -> "RandAugment":
        """One operation at magnitude 10: the other reading of the paper's "(1, 10)"."""
        return cls(num_ops=1, magnitude=10.0)

    def __call__(self, images, *, seed):
        """Augments a batch.

        Args:
          images: float32 [batch, height, width, channels] in [0, 1]; channels 1 or 3, sides 8 to
            256 pixels. The batch size may be unknown or 0.
          seed: int32 [2], or whatever converts to an integer tensor of that shape, such as
            `step_seed(...)`.

        Returns:
          float32, the shape of `images`, in [0, 1]. No gradient flows through it.

        Raises:
          ValueError: if an argument has the wrong dtype or shape.
        """
        images = _check_images(images)
        if self.num_ops == 0:
            return images
        levels = _to_levels(images)
        bits = _random_bits(levels, "strong", seed, self.num_ops)
        # The high bits choose the operation, the lowest one the sign.
        operations = tf.cast(_high(bits * len(OPERATIONS), 32), tf.int32)
        signs = tf.cast(1 - 2 * (bits & 1), tf.float32)

        apply = _grouped_operations(float(self.magnitude), *images.shape[1:])

        def one_slot(slot, levels):
            return slot + 1, apply(levels, operations[:, slot], signs[:, slot])

        if self.num_ops == 1:
            _, levels = one_slot(0, levels)
        else:
            # A loop, not 10 copies: the graph is sent to every client of every round.
            _, levels = tf.while_loop(
                lambda slot, _: slot < self.num_ops,
                one_slot,
                (tf.constant(0), levels),
                shape_invariants=(tf.TensorShape([]), levels.shape),
            )
        return tf.ensure_shape(tf.stop_gradient(_from_levels(levels)), images.shape)


@dataclasses.dataclass(frozen=True)
class WeakAugment:
    """Random horizontal flip and shift: the weak augmentation of FixMatch (Sohn et al. 2020).

    Pixels are moved, never changed. Draws are independent of `RandAugment`'s for the same seed.

    Attributes:
      flip: whether each image is mirrored left to right with probability 1/2.
      max_shift: each image moves by a whole number of pixels drawn uniformly from
        [-max_shift, max_shift], separately in each direction; the border is filled by reflection
        (without repeating the edge). An int >= 0, smaller than the image's sides.
    """

    flip: bool = True
    max_shift: int = 4

    def __post_init__(self):
        if not isinstance(self.flip, bool | np.bool_):
            raise ValueError(f"flip must be True or False, got {self.flip!r}")
        _check_count("max_shift", self.max_shift)

    def __call__(self, images, *, seed):
        """Augments a batch; arguments, result and errors as for `RandAugment.__call__`."""
        images = _check_images(images)
        _, height, width, channels = images.shape
        if self.max_shift >= min(height, width):
            raise ValueError(
                f"max_shift must be smaller than the image's sides, got {self.max_shift} for "
                f"{height}x{width} images"
            )
        bits = _random_bits(_to_levels(images), "weak", seed, 3)
        shifts = _high(bits[:, :2] * (2 * self.max_shift + 1), 32) - self.max_shift
        rows = _reflect(tf.range(height, dtype=tf.int64) + shifts[:, :1], height)
        columns = _reflect(tf.range(width, dtype=tf.int64) + shifts[:, 1:], width)
        if self.flip:
            # tf.equal: in the graphs that TFF builds, `==` compares the tensor objects.
            flipped = tf.equal(_high(bits[:, 2:], 31), 1)
            columns = tf.where(flipped, width - 1 - columns, columns)
        first_rows = height * tf.range(tf.shape(images, tf.int64)[0])[:, tf.newaxis]
        pixels = width * (first_rows + rows)[:, :, tf.newaxis] + columns[:, tf.newaxis, :]
        moved = tf.gather(tf.reshape(images, [-1, channels]), pixels)
        return tf.ensure_shape(tf.stop_gradient(moved), images.shape)


def apply_operation(name, images, magnitude, *, sign=1):
    """Applies one of `RandAugment`'s operations to a whole batch.

    Args:
      name: one of `OPERATIONS`.
      images: float32 [batch, height, width, channels] in [0, 1], as for `RandAugment`.
      magnitude: M in [0, 30].
      sign: 1 or -1. With 1, Rotate turns counter-clockwise, the shears and translations read each
        output pixel from further right or down, and the enhancement factors are above 1.

    Returns:
      float32, the shape of `images`, multiples of 1/255.

    Raises:
      ValueError: if an argument is not as above.
    """
    if name not in OPERATIONS:
        raise ValueError(f"unknown operation {name!r}; choose from {', '.join(OPERATIONS)}")
    _check_magnitude(magnitude)
    if sign not in (1, -1):
        raise ValueError(f"sign must be 1 or -1, got {sign!r}")
    images = _check_images(images)
    levels = _to_levels(images)
    batch = tf.shape(levels)[:1]
    apply = _grouped_operations(float(magnitude), *images.shape[1:])
    levels = apply(
        levels, tf.fill(batch, OPERATIONS.index(name)), tf.fill(batch, tf.constant(float(sign)))
    )
    return tf.ensure_shape(_from_levels(levels), images.shape)


def step_seed(seed, round_num, step):
    """Makes the seed of one step of one round, a hash without any state.

    Values in [0, 2**32) that differ in one of the three arguments never give the same seed. Others
    do as rarely as chance has it: once in 2**64.

    Args:
      seed: of the run; int, or scalar integer tensor.
      round_num: int, or scalar integer tensor.
      step: int, or scalar integer tensor.

    Returns:
      int32 [2], what `RandAugment`, `WeakAugment` and TensorFlow's stateless functions take.

    Raises:
      ValueError: if an argument has the wrong dtype or shape.
    """
    key = tf.constant(_SEED_WORDS, tf.int64)
    for field, value in (("seed", seed), ("round_num", round_num), ("step", step)):
        key = _fold(key, _integer_scalar(field, value))
    # 0..2**32-1 as a two's complement, without the overflow that a cast leaves undefined.
    return tf.cast((key ^ 2**31) - 2**31, tf.int32)


# Checks.


def _check_count(field, value):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise ValueError(f"{field} must be an int of at least 0, got {value!r}")


def _check_magnitude(value):
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_MAGNITUDE:
        raise ValueError(f"magnitude must be a number in [0, {MAX_MAGNITUDE:g}], got {value!r}")


def _check_images(images):
    images = tf.convert_to_tensor(images)
    if images.dtype != tf.float32:
        raise ValueError(
            f"images must be float32 in [0, 1], got {images.dtype.name}; convert with "
            "augmentation.to_float"
        )
    if images.shape.rank != 4 or None in images.shape.as_list()[1:]:
        raise ValueError(
            "images must be [batch, height, width, channels] with all but the batch size known, "
            f"got shape {images.shape}"
        )
    _, height, width, channels = images.shape
    if not all(_MIN_SIDE <= side <= _MAX_SIDE for side in (height, width)):
        raise ValueError(
            f"images must have sides of {_MIN_SIDE} to {_MAX_SIDE} pixels, got {height}x{width}"
        )
    if channels not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels, got {channels}")
    return images


# Grey levels: whole numbers 0..255 in float32.


def _to_levels(images):
    return tf.clip_by_value(tf.floor(images * 255.0 + 0.5), 0.0, 255.0)


def _from_levels(levels):
    # Not `levels / 255`: graph optimisation turns that into a float32 multiplication, whose last
    # bit differs from eager mode. Through float64 the result is the correctly rounded quotient.
    return tf.cast(tf.cast(levels, tf.float64) * (1 / 255), tf.float32)


# Random bits: a counter-based hash, in int64 holding 32-bit words so that nothing overflows.

_WORD = 0xFFFFFFFF
_STREAMS = {"strong": 0x5EED51, "weak": 0x5EEDAE}
_SEED_WORDS = (0x5EED01, 0x5EED02)


def _high(word, bits):
    return tf.bitwise.right_shift(word, tf.constant(bits, tf.int64))


def _mix(word):
    word = (word + 0x9E3779B9) & _WORD  # so that 0 is no fixed point
    for multiplier in (0x5BD1E995, 0x2C9277B5):  # odd and below 2**31: products fit int64
        word = ((word ^ _high(word, 16)) * multiplier) & _WORD
    return word ^ _high(word, 15)


def _fold(key, value):
    """Mixes an int64 value (both halves) into the 32-bit words `key`."""
    return _mix(_mix(key ^ (value & _WORD)) ^ (_high(value, 32) & _WORD))


def _integer_scalar(field, value):
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return tf.constant((int(value) + 2**63) % 2**64 - 2**63, tf.int64)
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_integer or value.shape.rank != 0:
        raise ValueError(
            f"{field} must be an int or a scalar integer tensor, got {value.dtype.name} of shape "
            f"{value.shape}"
        )
    return tf.cast(value, tf.int64)


def _two_integers(seed):
    seed = tf.convert_to_tensor(seed)
    if not seed.dtype.is_integer or seed.shape.as_list() != [2]:
        raise ValueError(
            "seed must be two integers, as augmentation.step_seed(seed, round_num, step) makes "
            f"them, got {seed.dtype.name} of shape {seed.shape}"
        )
    return tf.cast(seed, tf.int64)


@functools.cache
def _fingerprint_weights(num_pixels):
    """Odd whole numbers, float64 [num_pixels, 2]. RandomState's stream is frozen for good."""
    weights = np.random.RandomState(2023).randint(2**26, size=(num_pixels, 2), dtype=np.int64)
    return 2.0 * weights + 1.0


def _fingerprints(levels):
    """Two integers for each image: weighted sums of its levels, int64 [batch, 2].

    8-bit levels, 27-bit weights and at most 2**17.6 values: every partial sum is a whole number
    below 2**53, so float64 adds them exactly in any order (and faster than int64 would).
    """
    values = tf.reshape(levels, [-1, math.prod(levels.shape[1:])])
    sums = tf.matmul(tf.cast(values, tf.float64), _fingerprint_weights(values.shape[1]))
    return tf.cast(sums, tf.int64)


def _random_bits(levels, stream, seed, count):
    """32 random bits for each image and draw: int64 [batch, count] in [0, 2**32)."""
    seed = _two_integers(seed)
    key = _fold(_fold(tf.constant(_STREAMS[stream], tf.int64), seed[0]), seed[1])
    fingerprints = _fingerprints(levels)
    key = _fold(_fold(key, fingerprints[:, 0]), fingerprints[:, 1])
    return _fold(key[:, tf.newaxis], tf.range(count, dtype=tf.int64))


def _reflect(index, size):
    """Folds indices from (-size, 2 size - 1) back into [0, size): 2 1 | 0 1 2 3 | 2 1."""
    return (size - 1) - abs((size - 1) - abs(index))


# Operations. Each takes (levels [group, height, width, channels], operation [group] int32 index
# into OPERATIONS, sign [group] float32 +-1) and returns levels; the group may be empty.


def _grouped_operations(magnitude, height, width, channels):
    """Returns apply(levels, operation, sign): each image through its own operation.

    Images with the same operation are gathered and go through it together, which is what makes
    this faster than one image at a time.
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


@functools.cache
def _keras_cv_layers():
    """`keras_cv.layers`, imported late and quietly: it takes seconds and prints its backend."""
    with contextlib.redirect_stdout(io.StringIO()):
        from keras_cv import layers
    return layers


# What the pixel functions of keras-cv's layers read from `self`. Making the layers themselves would
# also make a random generator, that is a variable, and TFF cannot run a graph that holds one.
_LAYER = types.SimpleNamespace(value_range=(0, 255), compute_dtype=tf.float32)


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
