"""RandAugment's operations against Pillow and NumPy."""

import itertools

import numpy as np
import pytest
from grey_images import applied, make_images, smooth_images
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from tff_fedlabel.augmentation import OPERATIONS


def _pillow(images, operation):
    """`operation`, a function of Pillow images, on each image of a uint8 batch."""

    def one(image):
        image = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        return np.asarray(operation(image)).reshape(images.shape[1:])

    return np.stack([one(image) for image in images]).astype(int)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "magnitude", "operation"),
    [
        ("Identity", 30, lambda image: image),
        ("Equalize", 7, ImageOps.equalize),
        ("Solarize", 1, lambda image: ImageOps.solarize(image, 247)),  # >= 256 * 29 / 30 = 247.5
        ("Solarize", 10, lambda image: ImageOps.solarize(image, 171)),  # 170.7
        ("Solarize", 0, lambda image: image),
        ("Solarize", 30, ImageOps.invert),
        ("Posterize", 0, lambda image: image),
        ("Posterize", 1, lambda image: image),
        ("Posterize", 10, lambda image: ImageOps.posterize(image, 7)),
        ("Posterize", 15, lambda image: ImageOps.posterize(image, 6)),
        ("Posterize", 30, lambda image: ImageOps.posterize(image, 4)),
    ],
)
def test_equals_pillow(name, magnitude, operation, channels):
    images = make_images(channels=channels)
    images[images == 247] = 246  # Pillow's threshold is whole, 247 here stands for 247.5
    np.testing.assert_array_equal(applied(name, images, magnitude), _pillow(images, operation))


@pytest.mark.parametrize("size", [(8, 8), (9, 31), (28, 28), (64, 64)])
def test_equalize_equals_pillow_at_every_size(size):
    images = make_images(4, *size, channels=3)
    images[0] = 77  # one level only: unchanged
    images[1, :, :, 0] = np.where(images[1, :, :, 0] > 128, 255, 254)
    expected = _pillow(images, ImageOps.equalize)
    np.testing.assert_array_equal(applied("Equalize", images, 1), expected)


def test_auto_contrast_is_exact_for_every_range_and_level():
    low, high = np.triu_indices(256, k=1)
    levels = np.clip(np.arange(256)[np.newaxis], low[:, np.newaxis], high[:, np.newaxis])
    spread = (high - low)[:, np.newaxis]
    # round((level - low) * 255 / spread), halves up, in integers
    expected = (2 * 255 * (levels - low[:, np.newaxis]) + spread) // (2 * spread)
    images = levels.reshape(-1, 16, 16, 1).astype(np.uint8)
    actual = applied("AutoContrast", images, 1).reshape(levels.shape)
    np.testing.assert_array_equal(actual, expected)


def test_auto_contrast_is_pillows_up_to_its_truncation():
    images = make_images()
    images[0, :, :, 1] = 9  # a flat channel stays
    difference = applied("AutoContrast", images, 30) - _pillow(images, ImageOps.autocontrast)
    assert set(np.unique(difference)) <= {0, 1}


ENHANCERS = {
    "Color": ImageEnhance.Color,
    "Contrast": ImageEnhance.Contrast,
    "Brightness": ImageEnhance.Brightness,
    "Sharpness": ImageEnhance.Sharpness,
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("magnitude", [0, 1, 10, 30])
@pytest.mark.parametrize("name", ENHANCERS)
def test_enhancements_are_pillows_up_to_its_truncation(name, magnitude, sign, channels):
    images = make_images(channels=channels)
    factor = 1 + sign * 0.9 * magnitude / 30
    if name == "Color" and channels == 1:
        expected = images.astype(int)
    else:
        expected = _pillow(images, lambda image: ENHANCERS[name](image).enhance(factor))
    actual = applied(name, images, magnitude, sign)
    assert np.abs(actual - expected).max() <= 1
    if magnitude == 0:
        np.testing.assert_array_equal(actual, images)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("sign", [-1, 1])
def test_enhancements_blend_with_their_degenerate_image(sign, channels):
    images = make_images(channels=channels)
    exact = images.astype(np.float64)
    grey = _pillow(images, lambda image: image.convert("L").convert(image.mode))
    mean = np.floor(grey[..., :1].mean(axis=(1, 2), keepdims=True) + 0.5)
    smooth = _pillow(images, lambda image: image.filter(ImageFilter.SMOOTH))
    factor = 1 + sign * np.round(4096 * 0.9 * 20 / 30) / 4096
    for name, degenerate in [
        ("Color", grey),
        ("Contrast", mean),
        ("Brightness", 0.0),
        ("Sharpness", smooth),
    ]:
        blended = degenerate + factor * (exact - degenerate)
        expected = np.clip(np.floor(blended + 0.5), 0, 255)
        np.testing.assert_array_equal(applied(name, images, 20, sign), expected, err_msg=name)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", ["TranslateX", "TranslateY"])
def test_translates_by_whole_pixels(name, sign):
    images = make_images(height=40, width=40)  # 0.45 * 40 = 18 pixels at magnitude 30
    axis = 2 if name == "TranslateX" else 1
    expected = np.zeros_like(images)
    source, target = [slice(None)] * 4, [slice(None)] * 4
    source[axis], target[axis] = (slice(6, None), slice(None, -6))[::sign]
    expected[tuple(target)] = images[tuple(source)]
    np.testing.assert_array_equal(applied(name, images, 10, sign), expected)


def test_translates_by_half_a_pixel_as_the_mean_of_neighbours():
    images = make_images(height=40, width=40)
    padded = np.pad(images, [(0, 0), (0, 0), (0, 1), (0, 0)]).astype(int)
    expected = (padded[:, :, :-1] + padded[:, :, 1:] + 1) // 2  # halves up
    np.testing.assert_array_equal(applied("TranslateX", images, 0.5 * 30 / 18), expected)


def _interpolated(images, columns, rows):
    """Bilinear interpolation in float64 at (columns, rows) [height, width]; black outside."""
    _, height, width, _ = images.shape
    result = np.zeros(images.shape)
    left, top = np.floor(columns).astype(int), np.floor(rows).astype(int)
    for down, right in itertools.product((0, 1), (0, 1)):
        x, y = left + right, top + down
        weight = (1 - np.abs(columns - x)) * (1 - np.abs(rows - y))
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        taps = images[:, np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)]
        result += (weight * inside)[..., np.newaxis] * taps
    return result


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("magnitude", [1, 10, 30])
@pytest.mark.parametrize("name", ["Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"])
def test_geometry_follows_its_definition(name, magnitude, sign):
    images = smooth_images()
    side = images.shape[1]
    strength = sign * magnitude / 30
    y, x = np.mgrid[:side, :side].astype(np.float64)
    columns, rows = x, y
    if name == "Rotate":
        angle, centre = np.radians(30 * strength), (side - 1) / 2
        u, v = x - centre, y - centre
        columns = np.cos(angle) * u - np.sin(angle) * v + centre
        rows = np.sin(angle) * u + np.cos(angle) * v + centre
    elif name == "ShearX":
        columns = x + 0.3 * strength * (y + 0.5)
    elif name == "ShearY":
        rows = y + 0.3 * strength * (x + 0.5)
    elif name == "TranslateX":
        columns = x + 0.45 * strength * side
    else:
        rows = y + 0.45 * strength * side
    difference = applied(name, images, magnitude, sign) - _interpolated(images, columns, rows)
    # Black meets the picture within a pixel of the border: there 1/16 pixel is up to 16 levels.
    inside = (columns > 0) & (columns < side - 1) & (rows > 0) & (rows < side - 1)
    assert np.abs(difference[:, inside]).max() < 2.5
    assert np.abs(difference).max() < 17


def test_rotates_as_pillow_does():
    images = smooth_images()
    expected = _pillow(images, lambda image: image.rotate(20, Image.Resampling.BILINEAR))
    difference = applied("Rotate", images, 20) - expected
    assert np.abs(difference[:, 8:-8, 8:-8]).max() <= 3


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", [(8, 8, 1), (17, 33, 3), (64, 64, 3)])
def test_any_content_stays_in_range(name, size):
    images = np.zeros((5, *size), np.uint8)
    images[1] = 255
    images[2] = 128
    images[3, 0, 0] = 255
    images[4] = np.random.default_rng(0).integers(0, 256, size)
    for magnitude, sign in itertools.product((0, 30), (-1, 1)):
        levels = applied(name, images, magnitude, sign)
        assert levels.shape == images.shape
        assert levels.min() >= 0 and levels.max() <= 255
        if magnitude == 0 and name not in ("AutoContrast", "Equalize"):
            np.testing.assert_array_equal(levels, images)


def test_operations_are_the_papers():
    assert len(OPERATIONS) == len(set(OPERATIONS)) == 14
