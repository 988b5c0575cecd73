"""What the model builders share: argument checks, one seed per layer, the dtype of the logits."""

import random
from collections.abc import Iterator, Sequence

import tensorflow as tf

MIN_SIDE, MAX_SIDE = 8, 64


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


def check_arguments(input_shape: Sequence[int], num_classes: int, width: int) -> None:
    """Raises `ValueError` unless the shape, class count and width make a model."""
    if len(input_shape) != 3:
        raise ValueError(f"input_shape must be (height, width, channels), got {input_shape!r}.")
    height, image_width, channels = input_shape
    if not all(MIN_SIDE <= side <= MAX_SIDE for side in (height, image_width)):
        raise ValueError(
            f"input_shape must have sides of {MIN_SIDE} to {MAX_SIDE} px, got {input_shape!r}."
        )
    if channels not in (1, 3):
        raise ValueError(f"input_shape must have 1 or 3 channels, got {input_shape!r}.")
    if num_classes < 2:
        raise ValueError(f"num_classes must be 2 or more, got {num_classes!r}.")
    if width < 1:
        raise ValueError(f"width must be 1 or more, got {width!r}.")
