"""The weak augmentation of FixMatch and its relatives."""

from __future__ import annotations

import dataclasses

from tff_fedlabel import _validation
from tff_fedlabel._lazy import tf
from tff_fedlabel.augmentation._pixels import check_data, float_images, to_levels
from tff_fedlabel.augmentation._randomness import high_bits, random_bits


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
        object.__setattr__(self, "flip", _validation.check_flag("flip", self.flip))
        object.__setattr__(self, "max_shift", _validation.check_int("max_shift", self.max_shift, 0))

    def check_images(self, shape, dtype):
        """Raises `ValueError` if images of this kind cannot be augmented, before they are traced.

        Arguments as for `RandAugment.check_images`.
        """
        height, width, _ = check_data(shape, dtype)
        if self.max_shift >= min(height, width):
            raise ValueError(
                f"max_shift must be smaller than the image's sides, got {self.max_shift} for "
                f"{height}x{width} images."
            )

    def __call__(self, images, *, seed):
        """Augments a batch; arguments, result and errors as for `RandAugment.__call__`."""
        images = float_images(images)
        self.check_images(images.shape, images.dtype)
        _, height, width, channels = images.shape
        bits = random_bits(to_levels(images), "weak", seed, 3)
        shifts = high_bits(bits[:, :2] * (2 * self.max_shift + 1), 32) - self.max_shift
        rows = _reflect(tf.range(height, dtype=tf.int64) + shifts[:, :1], height)
        columns = _reflect(tf.range(width, dtype=tf.int64) + shifts[:, 1:], width)
        if self.flip:
            # tf.equal: in the graphs that TFF builds, `==` compares the tensor objects.
            flipped = tf.equal(high_bits(bits[:, 2:], 31), 1)
            columns = tf.where(flipped, width - 1 - columns, columns)
        first_rows = height * tf.range(tf.shape(images, tf.int64)[0])[:, tf.newaxis]
        pixels = width * (first_rows + rows)[:, :, tf.newaxis] + columns[:, tf.newaxis, :]
        moved = tf.gather(tf.reshape(images, [-1, channels]), pixels)
        return tf.ensure_shape(tf.stop_gradient(moved), images.shape)


def _reflect(index, size):
    """Folds indices from (-size, 2 size - 1) back into [0, size): 2 1 | 0 1 2 3 | 2 1."""
    return (size - 1) - abs((size - 1) - abs(index))
