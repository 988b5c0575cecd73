"""Small image files and arrays of one's own."""

import numpy as np
import PIL.Image


def image(seed, height=10, width=10, channels=3):
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(pixels).save(path)


def arrays(number=60, num_classes=3, shape=(10, 10, 3), seed=0):
    """Images that differ from each other, so that a row can be found again by its pixels."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (number, *shape)).astype(np.uint8)
    return x, rng.integers(0, num_classes, number)
