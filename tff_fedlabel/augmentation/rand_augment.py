"""The paper's strong augmentation."""

from __future__ import annotations

import dataclasses

from tff_fedlabel import _validation
from tff_fedlabel._autograph import as_written
from tff_fedlabel._lazy import tf
from tff_fedlabel.augmentation._operations import MAX_MAGNITUDE, OPERATIONS, grouped_operations
from tff_fedlabel.augmentation._pixels import check_data, float_images, from_levels, to_levels
from tff_fedlabel.augmentation._randomness import high_bits, random_bits


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
        object.__setattr__(self, "num_ops", _validation.check_int("num_ops", self.num_ops, 0))
        object.__setattr__(self, "magnitude", _check_magnitude(self.magnitude))

    @classmethod
    def single(cls) -> RandAugment:
        """One operation at magnitude 10: the other reading of the paper's "(1, 10)"."""
        return cls(num_ops=1, magnitude=10.0)

    def check_images(self, shape, dtype):
        """Raises `ValueError` if images of this kind cannot be augmented, before they are traced.

        Args:
          shape: of a batch, [batch, height, width, channels], as in `__call__`; None is unknown.
          dtype: of the data that `to_float` converts, uint8 or floating point.
        """
        check_data(shape, dtype)

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
        return self._augmented(images, seed)

    @as_written  # AutoGraph takes over a second to convert it in each new process.
    def _augmented(self, images, seed):
        images = float_images(images)
        if self.num_ops == 0:
            return images
        levels = to_levels(images)
        bits = random_bits(levels, "strong", seed, self.num_ops)
        # The high bits choose the operation, the lowest one the sign.
        operations = tf.cast(high_bits(bits * len(OPERATIONS), 32), tf.int32)
        signs = tf.cast(1 - 2 * (bits & 1), tf.float32)

        apply = grouped_operations(self.magnitude, *images.shape[1:])

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
        return tf.ensure_shape(tf.stop_gradient(from_levels(levels)), images.shape)


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
    name = _validation.check_name("name", name, OPERATIONS)
    magnitude = _check_magnitude(magnitude)
    if sign not in (1, -1):
        raise ValueError(f"sign must be 1 or -1, got {sign!r}.")
    images = float_images(images)
    levels = to_levels(images)
    batch = tf.shape(levels)[:1]
    apply = grouped_operations(magnitude, *images.shape[1:])
    levels = apply(
        levels, tf.fill(batch, OPERATIONS.index(name)), tf.fill(batch, tf.constant(float(sign)))
    )
    return tf.ensure_shape(from_levels(levels), images.shape)


def _check_magnitude(value):
    return _validation.check_number("magnitude", value, 0.0, MAX_MAGNITUDE)
