"""Images for the tests of augmentation, as 8-bit levels and as floats."""

import itertools

import numpy as np

from tff_fedlabel.augmentation import apply_operation


def make_images(batch=6, height=32, width=24, channels=3, seed=0):
    """uint8 images with smooth and sharp parts, each channel leaving out some grey levels."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    result = np.empty((batch, height, width, channels), np.uint8)
    for image, channel in itertools.product(range(batch), range(channels)):
        angle, low, high = rng.uniform(0, 6.3), rng.integers(0, 60), rng.integers(170, 256)
        waves = np.sin((np.cos(angle) * x + np.sin(angle) * y) / rng.uniform(3, 9))
        noise = rng.uniform(-0.3, 0.3, waves.shape)
        scaled = low + (high - low) * np.clip((waves + noise + 1) / 2, 0, 1)
        result[image, :, :, channel] = scaled
    return result


def smooth_images(batch=4, side=32):
    """uint8 images so smooth that a sixteenth of a pixel moves no level by more than 2."""
    rng = np.random.default_rng(3)
    y, x = np.mgrid[:side, :side]
    phases = rng.uniform(0, 6.3, (batch, 1, 1))
    waves = 128 + 100 * np.sin(x / 6 + phases) * np.cos(y / 7 - phases)
    return np.uint8(np.round(waves))[..., np.newaxis]


def as_float(images):
    return images.astype(np.float32) / np.float32(255)


def levels_of(images):
    """Output images as whole levels; fails if they are not."""
    levels = np.asarray(images, np.float64) * 255
    np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
    return np.round(levels).astype(int)


def applied(name, images, magnitude, sign=1):
    return levels_of(apply_operation(name, as_float(images), magnitude, sign=sign))
