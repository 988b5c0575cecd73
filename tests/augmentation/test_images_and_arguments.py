"""Conversions of images, and what is refused."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from grey_images import as_float

from tff_fedlabel import augmentation
from tff_fedlabel.augmentation import RandAugment, WeakAugment, apply_operation

STRONG = RandAugment(num_ops=3, magnitude=20)
WEAK = WeakAugment()
BOTH = pytest.mark.parametrize("augment", [STRONG, WEAK], ids=["strong", "weak"])


def test_to_float_is_the_exact_quotient_everywhere():
    levels = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(augmentation.to_float(levels), as_float(levels))
    np.testing.assert_array_equal(tf.function(augmentation.to_float)(levels), as_float(levels))
    np.testing.assert_array_equal(augmentation.from_float(as_float(levels), tf.uint8), levels)
    halves = np.float64([0.0, 0.5, 1.0])
    assert augmentation.to_float(halves).dtype == tf.float32
    np.testing.assert_array_equal(augmentation.to_float(halves), halves)
    with pytest.raises(ValueError, match="uint8.*int32"):
        augmentation.to_float(np.int32([1]))


def test_from_float_clips_what_is_no_level():
    values = np.float32([-0.3, -0.001, 1.001, 1.02, 300.0, np.inf, -np.inf, np.nan, 0.5])
    for convert in (augmentation.from_float, tf.function(augmentation.from_float)):
        found = convert(values, tf.uint8)
        assert found.dtype == tf.uint8
        np.testing.assert_array_equal(found, [0, 0, 255, 255, 255, 255, 0, 0, 128])
        np.testing.assert_array_equal(convert(np.float64(values), "uint8"), found)
        np.testing.assert_array_equal(convert(values, tf.float32), values)
        np.testing.assert_array_equal(convert(values, tf.float64), np.float64(values))
    # Half of 255 is a tie, in float16 too, where 255 levels are not.
    np.testing.assert_array_equal(
        augmentation.from_float(np.float16([0.5, 1]), tf.uint8), [128, 255]
    )


def test_from_float_refuses_what_it_cannot_convert():
    with pytest.raises(ValueError, match="^images.*uint8"):
        augmentation.from_float(np.uint8([1]), tf.uint8)
    with pytest.raises(ValueError, match="^dtype.*int32"):
        augmentation.from_float(np.float32([1]), tf.int32)


def test_import_and_configurations_leave_tensorflow_alone():
    code = (
        "import sys\n"
        "from tff_fedlabel import augmentation, pseudo_labels\n"
        "assert 'tensorflow' not in sys.modules and 'keras_cv' not in sys.modules\n"
        "assert augmentation.RandAugment() == augmentation.RandAugment(10, 1)\n"
        "assert augmentation.RandAugment(2) != augmentation.RandAugment(10)\n"
        "assert augmentation.WeakAugment() == augmentation.WeakAugment(True, 4)\n"
        "pseudo_labels.check_options('variance', 'logits', 0.5, 'local')\n"
        "assert 'tensorflow' not in sys.modules\n"
        "augmentation.to_float([0.5])\n"
        "assert 'tensorflow' in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_configurations_are_frozen_values():
    assert RandAugment() == RandAugment(num_ops=10, magnitude=1.0)
    assert RandAugment.single() == RandAugment(num_ops=1, magnitude=10.0)
    assert WeakAugment() == WeakAugment(flip=True, max_shift=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RandAugment().num_ops = 2


def test_numpy_numbers_become_pythons():
    strong = RandAugment(np.int64(2), np.float32(7.5))
    weak = WeakAugment(np.bool_(False), np.uint8(3))
    for value, expected in [
        (strong.num_ops, 2),
        (strong.magnitude, 7.5),
        (weak.flip, False),
        (weak.max_shift, 3),
        (RandAugment(magnitude=np.int32(4)).magnitude, 4.0),
    ]:
        assert type(value) is type(expected) and value == expected
    assert repr(strong) == "RandAugment(num_ops=2, magnitude=7.5)"
    images = np.random.default_rng(0).random((3, 9, 8, 1), np.float32)
    np.testing.assert_array_equal(
        strong(images, seed=(1, 2)), RandAugment(2, 7.5)(images, seed=(1, 2))
    )


@BOTH
def test_images_are_checked_before_anything_is_traced(augment):
    for shape in ([None, 8, 8, 1], tf.TensorShape([5, 256, 9, 3])):
        for dtype in (tf.uint8, tf.float32, "float16"):
            augment.check_images(shape, dtype)
    for shape, dtype, message in [
        ([None, 64], tf.uint8, r"batch, height.*\(None, 64\)"),
        ([8, 8, 3], tf.uint8, "batch, height"),
        (None, tf.uint8, "batch, height.*unknown"),
        ([None, None, 8, 3], tf.float32, "all but the batch size known"),
        ([None, 8, 8, None], tf.float32, "all but the batch size known"),
        ([None, 8, 8, 4], tf.float32, "1 or 3 channels, got 4"),
        ([None, 7, 32, 3], tf.float32, "8 to 256 pixels, got 7x32"),
        ([None, 32, 257, 3], tf.float32, "8 to 256 pixels, got 32x257"),
        ([None, 8, 8, 3], tf.int32, "uint8.*floating point.*int32"),
    ]:
        with pytest.raises(ValueError, match=f"^images.*{message}") as error:
            augment.check_images(shape, dtype)
        assert len(str(error.value).splitlines()) == 1
    with pytest.raises(ValueError, match="max_shift.*got 9 for 32x9"):
        WeakAugment(max_shift=9).check_images([None, 32, 9, 3], tf.uint8)
    WeakAugment(max_shift=8).check_images([None, 32, 9, 3], tf.uint8)


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
