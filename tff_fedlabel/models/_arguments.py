"""What the model builders share: argument checks, one seed per layer, the dtype of the logits."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tff_fedlabel import _validation

MIN_SIDE, MAX_SIDE = 8, 256


def seeds(seed: int) -> Iterator[int]:
    """Yields a different seed for each layer, always the same ones for the same `seed`.

    Keras initialisers that share a seed give layers of one shape the same weights.
    """
    generator = random.Random(seed)
    while True:
        yield generator.getrandbits(31)


def logits_dtype() -> str:
    """The dtype in which the last layers compute: that of weights under the global Keras policy.

    Under a mixed precision policy they stay in float32, as Keras' guide advises: a bfloat16 logit
    of 8 or more is a multiple of 1/16, too coarse for a threshold on its probability.
    """
    return tf.keras.mixed_precision.global_policy().variable_dtype


def image_shape(input_shape: Any) -> tuple[int, int, int]:
    """Returns (height, width, channels) as Python's ints of 1 or more.

    Raises:
      ValueError: If `input_shape` is not that; a `TypeError` too if it is of the wrong type.
    """
    sides = input_shape.as_list() if isinstance(input_shape, tf.TensorShape) else input_shape
    sides = tuple(sides) if isinstance(sides, list | tuple | np.ndarray) else ()
    if len(sides) != 3:
        raise _validation.WrongTypeError(
            f"input_shape must be (height, width, channels), got {input_shape!r}."
        )
    return tuple(
        _validation.check_int(f"input_shape[{index}]", side) for index, side in enumerate(sides)
    )


def checked_arguments(
    input_shape: Any, num_classes: Any, width: Any, seed: Any
) -> tuple[tuple[int, int, int], int, int, int]:
    """Returns the arguments of a builder as Python's ints.

    Raises:
      ValueError: Unless the shape has sides of 8 to 256 px and 1 or 3 channels, there are 2 classes
        or more, the width is 1 or more and the seed in [0, 2^31); a `TypeError` too if an argument
        is of the wrong type.
    """
    shape = image_shape(input_shape)
    height, image_width, channels = shape
    if not all(MIN_SIDE <= side <= MAX_SIDE for side in (height, image_width)):
        raise ValueError(
            f"input_shape must have sides of {MIN_SIDE} to {MAX_SIDE} px, got {shape!r}."
        )
    if channels not in (1, 3):
        raise ValueError(f"input_shape must have 1 or 3 channels, got {shape!r}.")
    return (
        shape,
        _validation.check_int("num_classes", num_classes, 2),
        _validation.check_int("width", width),
        _validation.check_seed(seed),
    )
