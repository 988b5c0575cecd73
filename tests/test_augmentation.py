"""Augmentation against Pillow and NumPy, and that its randomness is a function of its arguments."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from tensorflow.python.framework import op_def_registry

from tff_fedlabel import augmentation
from tff_fedlabel.augmentation import (
    OPERATIONS,
    RandAugment,
    WeakAugment,
    apply_operation,
    step_seed,
)


def _images(batch=6, height=32, width=24, channels=3, seed=0):
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


def _smooth_images(batch=4, side=32):
    """uint8 images so smooth that a sixteenth of a pixel moves no level by more than 2."""
    rng = np.random.default_rng(3)
    y, x = np.mgrid[:side, :side]
    phases = rng.uniform(0, 6.3, (batch, 1, 1))
    waves = 128 + 100 * np.sin(x / 6 + phases) * np.cos(y / 7 - phases)
    return np.uint8(np.round(waves))[..., np.newaxis]


def _float(images):
    return images.astype(np.float32) / np.float32(255)


def _levels(images):
    """Output images as whole levels; fails if they are not."""
    levels = np.asarray(images, np.float64) * 255
    np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
    return np.round(levels).astype(int)


def _apply(name, images, magnitude, sign=1):
    return _levels(apply_operation(name, _float(images), magnitude, sign=sign))


def _pillow(images, operation):
    """`operation`, a function of Pillow images, on each image of a uint8 batch."""

    def one(image):
        image = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        return np.asarray(operation(image)).reshape(images.shape[1:])

    return np.stack([one(image) for image in images]).astype(int)


# One operation at a time.


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
    images = _images(channels=channels)
    images[images == 247] = 246  # Pillow's threshold is whole, 247 here stands for 247.5
    np.testing.assert_array_equal(_apply(name, images, magnitude), _pillow(images, operation))


@pytest.mark.parametrize("size", [(8, 8), (9, 31), (28, 28), (64, 64)])
def test_equalize_equals_pillow_at_every_size(size):
    images = _images(4, *size, channels=3)
    images[0] = 77  # one level only: unchanged
    images[1, :, :, 0] = np.where(images[1, :, :, 0] > 128, 255, 254)
    expected = _pillow(images, ImageOps.equalize)
    np.testing.assert_array_equal(_apply("Equalize", images, 1), expected)


def test_auto_contrast_is_exact_for_every_range_and_level():
    low, high = np.triu_indices(256, k=1)
    levels = np.clip(np.arange(256)[np.newaxis], low[:, np.newaxis], high[:, np.newaxis])
    spread = (high - low)[:, np.newaxis]
    # round((level - low) * 255 / spread), halves up, in integers
    expected = (2 * 255 * (levels - low[:, np.newaxis]) + spread) // (2 * spread)
    images = levels.reshape(-1, 16, 16, 1).astype(np.uint8)
    actual = _apply("AutoContrast", images, 1).reshape(levels.shape)
    np.testing.assert_array_equal(actual, expected)


def test_auto_contrast_is_pillows_up_to_its_truncation():
    images = _images()
    images[0, :, :, 1] = 9  # a flat channel stays
    difference = _apply("AutoContrast", images, 30) - _pillow(images, ImageOps.autocontrast)
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
    images = _images(channels=channels)
    factor = 1 + sign * 0.9 * magnitude / 30
    if name == "Color" and channels == 1:
        expected = images.astype(int)
    else:
        expected = _pillow(images, lambda image: ENHANCERS[name](image).enhance(factor))
    actual = _apply(name, images, magnitude, sign)
    assert np.abs(actual - expected).max() <= 1
    if magnitude == 0:
        np.testing.assert_array_equal(actual, images)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("sign", [-1, 1])
def test_enhancements_blend_with_their_degenerate_image(sign, channels):
    images = _images(channels=channels)
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
        np.testing.assert_array_equal(_apply(name, images, 20, sign), expected, err_msg=name)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", ["TranslateX", "TranslateY"])
def test_translates_by_whole_pixels(name, sign):
    images = _images(height=40, width=40)  # 0.45 * 40 = 18 pixels at magnitude 30
    axis = 2 if name == "TranslateX" else 1
    expected = np.zeros_like(images)
    source, target = [slice(None)] * 4, [slice(None)] * 4
    source[axis], target[axis] = (slice(6, None), slice(None, -6))[::sign]
    expected[tuple(target)] = images[tuple(source)]
    np.testing.assert_array_equal(_apply(name, images, 10, sign), expected)


def test_translates_by_half_a_pixel_as_the_mean_of_neighbours():
    images = _images(height=40, width=40)
    padded = np.pad(images, [(0, 0), (0, 0), (0, 1), (0, 0)]).astype(int)
    expected = (padded[:, :, :-1] + padded[:, :, 1:] + 1) // 2  # halves up
    np.testing.assert_array_equal(_apply("TranslateX", images, 0.5 * 30 / 18), expected)


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
    images = _smooth_images()
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
    difference = _apply(name, images, magnitude, sign) - _interpolated(images, columns, rows)
    # Black meets the picture within a pixel of the border: there 1/16 pixel is up to 16 levels.
    inside = (columns > 0) & (columns < side - 1) & (rows > 0) & (rows < side - 1)
    assert np.abs(difference[:, inside]).max() < 2.5
    assert np.abs(difference).max() < 17


def test_rotates_as_pillow_does():
    images = _smooth_images()
    expected = _pillow(images, lambda image: image.rotate(20, Image.Resampling.BILINEAR))
    difference = _apply("Rotate", images, 20) - expected
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
        levels = _apply(name, images, magnitude, sign)
        assert levels.shape == images.shape
        assert levels.min() >= 0 and levels.max() <= 255
        if magnitude == 0 and name not in ("AutoContrast", "Equalize"):
            np.testing.assert_array_equal(levels, images)


def test_operations_are_the_papers():
    assert len(OPERATIONS) == len(set(OPERATIONS)) == 14


# Random draws.

STRONG = RandAugment(num_ops=3, magnitude=20)
WEAK = WeakAugment()
BOTH = pytest.mark.parametrize("augment", [STRONG, WEAK], ids=["strong", "weak"])


def _all_variants(images, magnitude):
    """levels [14 * 2, batch, ...] of every operation and sign."""
    pairs = itertools.product(OPERATIONS, (1, -1))
    return np.stack([_apply(name, images, magnitude, sign) for name, sign in pairs])


def _count_variants(augment, images, **key):
    """How often each operation and sign explains an image's output."""
    variants = _all_variants(images, augment.magnitude)
    outputs = _levels(augment(_float(images), **key))
    fits = (variants == outputs[np.newaxis]).all(axis=(2, 3, 4))
    assert fits.any(axis=0).all(), "an output is none of the operations"
    return dict(zip(itertools.product(OPERATIONS, (1, -1)), fits.sum(axis=1), strict=True))


def test_one_slot_draws_each_operation_and_sign_equally():
    images = _images(1400, 20, 18, seed=1)  # below 256 pixels Equalize changes nothing
    counts = _count_variants(RandAugment(1, 30), images, seed=(3, 5))
    signed = set(OPERATIONS) - {"Identity", "AutoContrast", "Equalize", "Solarize", "Posterize"}
    for name in OPERATIONS:
        if name in signed:
            # 50 expected: 5 standard deviations either side
            assert 16 < counts[name, 1] < 86 and 16 < counts[name, -1] < 86, (name, counts)
        else:
            assert 52 < counts[name, 1] < 150, (name, counts)


def test_slots_follow_one_another():
    images = _images(40, 8, 8, seed=2)
    outputs = _levels(RandAugment(2, 30)(_float(images), seed=(1, 0)))
    once = _all_variants(images, 30)
    twice = _all_variants(np.uint8(once).reshape(-1, *images.shape[1:]), 30)
    twice = twice.reshape(len(once), *once.shape)  # [second, first, batch, ...]
    fits = (twice == outputs).all(axis=(3, 4, 5))
    assert fits.any(axis=(0, 1)).all(), "an output is no pair of operations"
    # With one draw for both slots every output would be an operation applied twice.
    repeated = np.stack([fits[pair, pair] for pair in range(len(fits))]).any(axis=0)
    assert repeated.mean() < 0.5


def test_no_slots_return_the_images_untouched():
    images = np.random.default_rng(0).random((3, 8, 8, 1), np.float32)
    np.testing.assert_array_equal(RandAugment(0)(images, seed=(0, 0)), images)


@pytest.mark.parametrize("flip", [True, False])
def test_weak_flips_and_shifts_with_reflection(flip):
    images = _images(1200, 10, 9, seed=4)
    outputs = _levels(WeakAugment(flip, max_shift=2)(_float(images), seed=(9, 2)))
    counts = {}
    padded = np.pad(images, [(0, 0), (2, 2), (2, 2), (0, 0)], "reflect")
    for mirrored, down, right in itertools.product((False, True), range(5), range(5)):
        expected = padded[:, down : down + 10, right : right + 9]
        expected = expected[:, :, ::-1] if mirrored else expected
        counts[mirrored, down, right] = (expected == outputs).all(axis=(1, 2, 3)).sum()
    assert sum(counts.values()) == len(images)
    expected = len(images) / (50 if flip else 25)
    for (mirrored, _, _), count in counts.items():
        if mirrored and not flip:
            assert count == 0
        else:
            assert abs(count - expected) < 5 * expected**0.5, counts


def test_weak_without_flip_and_shift_is_the_identity():
    images = np.random.default_rng(0).random((3, 8, 8, 1), np.float32)
    np.testing.assert_array_equal(WeakAugment(False, 0)(images, seed=(0, 0)), images)


@BOTH
def test_same_pixels_wherever_the_image_stands(augment):
    images = _float(_images(20))
    whole = augment(images, seed=(4, 7)).numpy()
    order = np.random.default_rng(0).permutation(20)
    np.testing.assert_array_equal(augment(images[order], seed=(4, 7)), whole[order])
    for image in range(0, 20, 7):
        alone = augment(images[image : image + 1], seed=(4, 7))
        np.testing.assert_array_equal(alone, whole[image : image + 1])


@BOTH
def test_same_pixels_in_a_graph_of_unknown_batch_size(augment):
    images = _float(_images(12))

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, *images.shape[1:]], tf.float32),
            tf.TensorSpec([2], tf.int32),
        ]
    )
    def in_graph(images, seed):
        return augment(images, seed=seed)

    expected = augment(images, seed=(11, 2))
    np.testing.assert_array_equal(in_graph(images, [11, 2]), expected)
    np.testing.assert_array_equal(in_graph(images[3:5], [11, 2]), expected[3:5])
    assert in_graph(images[:0], [11, 2]).shape == (0, *images.shape[1:])
    assert in_graph.get_concrete_function().output_shapes.as_list() == [None, *images.shape[1:]]


@BOTH
def test_python_numbers_and_tensors_mean_the_same(augment):
    images = _float(_images(12))
    expected = augment(images, seed=(-3, 6))
    for seed in [
        [-3, 6],
        tf.constant([-3, 6]),
        tf.constant([-3, 6], tf.int64),
        np.int64([-3, 6]),
        [tf.constant(-3), 6],
    ]:
        np.testing.assert_array_equal(augment(images, seed=seed), expected)


def _assert_drawn_apart(outputs):
    for one, other in itertools.combinations(outputs, 2):
        same = (one == other).all(axis=(1, 2, 3)).mean()
        assert same < 0.3


@BOTH
def test_seeds_and_images_draw_differently(augment):
    images = _float(_images(40, seed=5))
    seeds = [(0, 0), (0, 1), (1, 0), (1, 1), (2**30, 0), (0, 2**20), (-1, 0), (0, -(2**31))]
    outputs = [augment(images, seed=seed).numpy() for seed in seeds]
    _assert_drawn_apart(outputs)
    # Images that differ in one pixel by one level draw afresh.
    twins = np.repeat(_images(1, seed=6), 40, axis=0)
    twins[np.arange(40), np.arange(40) % 32, np.arange(40) % 24, 0] ^= 1
    moved = augment(_float(twins), seed=(0, 0)).numpy()
    assert len(np.unique(np.round(moved * 64).reshape(40, -1), axis=0)) > 10


@BOTH
def test_the_same_image_in_two_steps_of_a_round_draws_differently(augment):
    images = _float(_images(40, seed=8))
    _assert_drawn_apart([augment(images, seed=step_seed(3, 7, step)).numpy() for step in range(4)])


# Seeds of steps.


def _python_step_seed(*values):
    """The hash in Python's integers, which neither overflow nor have a sign bit."""

    def mix(word):
        word = (word + 0x9E3779B9) % 2**32
        for multiplier in (0x5BD1E995, 0x2C9277B5):
            word = (word ^ word >> 16) * multiplier % 2**32
        return word ^ word >> 15

    words = [0x5EED01, 0x5EED02]
    for value in values:
        low, high = value % 2**32, value % 2**64 // 2**32
        words = [mix(mix(word ^ low) ^ high) for word in words]
    return np.array(words, np.uint32).view(np.int32)


SEEDS = [(0, 0, 0), (2**31 - 1, 1, 2), (-5, 7, 2**31 - 1), (12, -1, 3), (2**40 + 1, 2**33, 9)]


@pytest.mark.parametrize("values", SEEDS)
def test_step_seed_is_the_hash_in_a_graph_and_eagerly(values):
    expected = _python_step_seed(*values)
    found = step_seed(*values)
    assert found.dtype == tf.int32 and found.shape == (2,)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(step_seed(*np.int64(values)), expected)
    np.testing.assert_array_equal(step_seed(*(tf.constant(v, tf.int64) for v in values)), expected)
    for dtype in (tf.int32, tf.int64):
        if dtype.max < max(values):
            continue
        in_graph = tf.function(
            lambda round_num, step: step_seed(values[0], round_num, step),
            input_signature=[tf.TensorSpec([], dtype)] * 2,
        )
        np.testing.assert_array_equal(in_graph(*values[1:]), expected)
        assert not in_graph.get_concrete_function().graph.captures


def test_step_seeds_differ_and_their_bits_are_even():
    grid = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"), -1).reshape(-1, 3)
    seeds = np.array([step_seed(*values).numpy() for values in grid])
    for word in range(2):
        # Of 4096 draws out of 2**32, two are equal with a chance of 0.2%.
        assert len(np.unique(seeds[:, word])) == len(grid)
        bits = seeds[:, word].view(np.uint32)[:, np.newaxis] >> np.arange(32, dtype=np.uint32) & 1
        assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / len(grid) ** 0.5
    assert abs(np.corrcoef(seeds.T.astype(float))[0, 1]) < 5 / len(grid) ** 0.5


def test_step_seed_refuses_what_is_no_whole_number():
    for position, field in enumerate(("seed", "round_num", "step")):
        for wrong in (0.5, tf.constant([1, 2]), True):
            values = [0, 0, 0]
            values[position] = wrong
            with pytest.raises(ValueError, match=f"^{field} must") as error:
                step_seed(*values)
            assert len(str(error.value).splitlines()) == 1


def test_weak_and_strong_draw_independently():
    # With a shared stream, images with the same weak flip would share half of the operations.
    images = _images(600, 8, 8, seed=7)
    weak = _levels(WeakAugment(True, 0)(_float(images), seed=(0, 0)))
    flipped = (weak != images).any(axis=(1, 2, 3))
    strong = _levels(RandAugment(1, 30)(_float(images), seed=(0, 0)))
    for name in ("Rotate", "TranslateY"):
        chosen = np.zeros(len(images), bool)
        for sign in (1, -1):
            chosen |= (_apply(name, images, 30, sign) == strong).all(axis=(1, 2, 3))
        assert 0.15 < flipped[chosen].mean() < 0.85


@BOTH
@pytest.mark.parametrize("channels", [1, 3])
def test_empty_batch_and_result_type(augment, channels):
    images = tf.zeros([0, 28, 28, channels])
    assert augment(images, seed=(0, 0)).shape == (0, 28, 28, channels)
    result = augment(tf.ones([2, 28, 28, channels]), seed=(0, 0))
    assert result.dtype == tf.float32 and result.shape == (2, 28, 28, channels)


def test_ten_operations_of_any_strength_stay_in_range():
    images = np.random.default_rng(1).random((16, 32, 32, 3), np.float32)
    for magnitude in (1, 30):
        result = RandAugment(10, magnitude)(images, seed=(0, 0)).numpy()
        assert np.isfinite(result).all() and result.min() >= 0 and result.max() <= 1


# In other runtimes.


@pytest.mark.parametrize("augment", [RandAugment(), WEAK], ids=["strong", "weak"])
def test_graph_has_no_variable_and_no_stateful_operation(augment):
    function = tf.function(lambda images: augment(images, seed=(0, 0)))
    graph = function.get_concrete_function(tf.TensorSpec([None, 32, 32, 3])).graph
    assert not graph.captures and not graph.variables
    definition = graph.as_graph_def()
    nodes = [*definition.node]
    for library_function in definition.library.function:
        nodes += library_function.node_def
    assert len(nodes) > 20
    assert not {node.op for node in nodes if op_def_registry.get(node.op).is_stateful}
    assert not [node.op for node in nodes if "Var" in node.op]


def test_graph_can_be_imported_again():
    images = _float(_images(8))
    function = tf.function(lambda images: STRONG(images, seed=(1, 2)))
    concrete = function.get_concrete_function(tf.TensorSpec([None, *images.shape[1:]]))
    definition = concrete.graph.as_graph_def()

    def load():
        tf.graph_util.import_graph_def(definition, name="")

    imported = tf.compat.v1.wrap_function(load, [])
    feed, fetch = concrete.inputs[0].name, concrete.outputs[0].name
    run = imported.prune(
        imported.graph.get_tensor_by_name(feed), imported.graph.get_tensor_by_name(fetch)
    )
    np.testing.assert_array_equal(run(tf.constant(images)), STRONG(images, seed=(1, 2)))


@pytest.mark.parametrize("channels", [1, 3])
def test_same_pixels_in_tffs_worker(local_runtime, channels):
    images = _float(_images(64, channels=channels))
    strong = RandAugment(10, 1)
    spec = tf.TensorSpec([None, *images.shape[1:]], tf.float32)

    @tff.tensorflow.computation(tff.SequenceType(tff.types.tensorflow_to_type(spec)), np.int32)
    def collect(batches, round_num):
        def append(results, batch):
            return tuple(
                tf.concat([result, augment(batch, seed=step_seed(8, round_num, 1))], axis=0)
                for result, augment in zip(results, (strong, STRONG, WEAK), strict=True)
            )

        return batches.reduce((tf.zeros([0, *images.shape[1:]]),) * 3, append)

    collected = collect(tf.data.Dataset.from_tensor_slices(images).batch(24), 5)
    for actual, augment in zip(collected, (strong, STRONG, WEAK), strict=True):
        np.testing.assert_array_equal(actual, augment(images, seed=step_seed(8, 5, 1)))


# Conversions and refusals.


def test_to_float_is_the_exact_quotient_everywhere():
    levels = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(augmentation.to_float(levels), _float(levels))
    np.testing.assert_array_equal(tf.function(augmentation.to_float)(levels), _float(levels))
    np.testing.assert_array_equal(augmentation.from_float(_float(levels), tf.uint8), levels)
    halves = np.float64([0.0, 0.5, 1.0])
    assert augmentation.to_float(halves).dtype == tf.float32
    np.testing.assert_array_equal(augmentation.to_float(halves), halves)
    with pytest.raises(ValueError, match="uint8.*int32"):
        augmentation.to_float(np.int32([1]))


def test_configurations_are_frozen_values():
    assert RandAugment() == RandAugment(num_ops=10, magnitude=1.0)
    assert RandAugment.single() == RandAugment(num_ops=1, magnitude=10.0)
    assert WeakAugment() == WeakAugment(flip=True, max_shift=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RandAugment().num_ops = 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandAugment(num_ops=-1), "num_ops.*-1"),
        (lambda: RandAugment(num_ops=1.5), "num_ops.*1.5"),
        (lambda: RandAugment(num_ops=True), "num_ops.*True"),
        (lambda: RandAugment(magnitude=-0.1), "magnitude.*-0.1"),
        (lambda: RandAugment(magnitude=30.5), "magnitude.*30.5"),
        (lambda: RandAugment(magnitude=float("nan")), "magnitude.*nan"),
        (lambda: RandAugment(magnitude="1"), "magnitude.*'1'"),
        (lambda: WeakAugment(max_shift=-1), "max_shift.*-1"),
        (lambda: WeakAugment(flip=2), "flip.*2"),
        (lambda: apply_operation("Blur", np.zeros((1, 8, 8, 1), "f"), 1), "'Blur'.*Sharpness"),
        (lambda: apply_operation("Rotate", np.zeros((1, 8, 8, 1), "f"), 31), "magnitude.*31"),
        (lambda: apply_operation("Rotate", np.zeros((1, 8, 8, 1), "f"), 1, sign=0), "sign.*0"),
    ],
)
def test_values_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@BOTH
@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((1, 8, 8, 3), np.uint8), "float32.*uint8.*to_float"),
        (np.zeros((8, 8, 3), np.float32), "batch, height"),
        (np.zeros((1, 8, 8, 2), np.float32), "1 or 3 channels, got 2"),
        (np.zeros((1, 7, 8, 3), np.float32), "sides.*7x8"),
    ],
)
def test_wrong_images_are_refused(augment, images, message):
    with pytest.raises(ValueError, match=message):
        augment(images, seed=(0, 0))


@BOTH
def test_wrong_keys_and_unknown_sizes_are_refused(augment):
    images = np.zeros((1, 8, 8, 1), np.float32)
    for seed, got in [
        ((0.5, 0.5), "float32"),
        (0, r"\(\)"),
        ((1, 2, 3), r"\(3,\)"),
        (tf.constant([True, False]), "bool"),
    ]:
        with pytest.raises(ValueError, match=f"^seed.*step_seed.*{got}") as error:
            augment(images, seed=seed)
        assert len(str(error.value).splitlines()) == 1
    function = tf.function(lambda images: augment(images, seed=(0, 0)))
    with pytest.raises(ValueError, match="all but the batch size known"):
        function.get_concrete_function(tf.TensorSpec([None, None, 8, 1]))
    with pytest.raises(ValueError, match="max_shift.*8x8"):
        WeakAugment(max_shift=8)(images, seed=(0, 0))
