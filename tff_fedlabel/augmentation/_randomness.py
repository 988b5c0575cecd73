"""Random bits from a counter-based hash, in int64 holding 32-bit words so that nothing overflows.

A TFF client knows neither its id nor a random state, so every draw is a hash of the seed and a
fingerprint of the image's pixels. The same two give the same bits wherever the image stands in a
batch, eagerly or in a graph, in this process or in TFF's C++ worker; equal images in one batch
therefore draw alike. No variable and no stateful operation enters the graph.
"""

from __future__ import annotations

import functools
import math
import numbers

import numpy as np

from tff_fedlabel._autograph import as_written
from tff_fedlabel._lazy import tf

_WORD = 0xFFFFFFFF
_STREAMS = {"strong": 0x5EED51, "weak": 0x5EEDAE}
_SEED_WORDS = (0x5EED01, 0x5EED02)


@as_written
def step_seed(seed, round_num, step):
    """Makes the seed of one step of one round: a hash, without any state.

    Two triples of values in [0, 2**32) that differ in one argument only never give the same seed.
    Other triples do as rarely as by chance: once in 2**64.

    Args:
      seed: of the run; int, or scalar integer tensor.
      round_num: int, or scalar integer tensor.
      step: int, or scalar integer tensor.

    Returns:
      int32 [2], as `RandAugment`, `WeakAugment` and TensorFlow's stateless functions take it.

    Raises:
      ValueError: if an argument has the wrong dtype or shape.
    """
    key = tf.constant(_SEED_WORDS, tf.int64)
    for field, value in (("seed", seed), ("round_num", round_num), ("step", step)):
        key = _fold(key, _integer_scalar(field, value))
    # 0..2**32-1 as two's complement, without the overflow, which is undefined in a cast.
    return tf.cast((key ^ 2**31) - 2**31, tf.int32)


def random_bits(levels, stream, seed, count):
    """Draws 32 random bits for each image and draw.

    Args:
      levels: whole grey levels 0..255, float32 [batch, height, width, channels]; all but the batch
        size known.
      stream: "strong" or "weak": draws of the two are independent.
      seed: int32 [2], or what converts to it.
      count: draws of each image.

    Returns:
      int64 [batch, count] in [0, 2**32).

    Raises:
      ValueError: if `seed` is not two integers.
    """
    seed = _two_integers(seed)
    key = _fold(_fold(tf.constant(_STREAMS[stream], tf.int64), seed[0]), seed[1])
    fingerprints = _fingerprints(levels)
    key = _fold(_fold(key, fingerprints[:, 0]), fingerprints[:, 1])
    return _fold(key[:, tf.newaxis], tf.range(count, dtype=tf.int64))


def high_bits(word, bits):
    """Shifts int64 words right by `bits`."""
    return tf.bitwise.right_shift(word, tf.constant(bits, tf.int64))


def _mix(word):
    word = (word + 0x9E3779B9) & _WORD  # so that 0 is not mapped to itself
    for multiplier in (0x5BD1E995, 0x2C9277B5):  # odd and below 2**31: products fit int64
        word = ((word ^ high_bits(word, 16)) * multiplier) & _WORD
    return word ^ high_bits(word, 15)


def _fold(key, value):
    """Mixes an int64 value (both halves) into the 32-bit words `key`."""
    return _mix(_mix(key ^ (value & _WORD)) ^ (high_bits(value, 32) & _WORD))


def _integer_scalar(field, value):
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return tf.constant((int(value) + 2**63) % 2**64 - 2**63, tf.int64)
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_integer or value.shape.rank != 0:
        raise ValueError(
            f"{field} must be an int or a scalar integer tensor, got {value.dtype.name} of shape "
            f"{value.shape}."
        )
    return tf.cast(value, tf.int64)


def _two_integers(seed):
    seed = tf.convert_to_tensor(seed)
    if not seed.dtype.is_integer or seed.shape.rank != 1 or seed.shape[0] != 2:
        raise ValueError(
            "seed must be two integers, as augmentation.step_seed(seed, round_num, step) makes "
            f"them, got {seed.dtype.name} of shape {seed.shape}."
        )
    return tf.cast(seed, tf.int64)


@functools.cache
def _fingerprint_weights(num_pixels):
    """Odd whole numbers, float64 [num_pixels, 2]. NumPy never changes what RandomState draws."""
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
