"""ResNets: shapes, parameter counts, independence of the images of a batch, fixed weights."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from short_resnet import build_short_resnet

from tff_fedlabel import models
from tff_fedlabel.models._group_norm import GroupNorm
from tff_fedlabel.models.resnet import _num_groups

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


def count_parameters(depth, channels, classes, width):
    """Convolutions without bias, two norm parameters a channel, and the last layer."""

    def conv_and_norm(inputs, outputs, kernel):
        return kernel * kernel * inputs * outputs + 2 * outputs

    total = conv_and_norm(channels, width, 3)
    inputs = width
    for stage, blocks in enumerate(BLOCKS[depth]):
        inner = width * 2**stage
        outputs = 4 * inner if depth == 50 else inner
        for block in range(blocks):
            if depth == 50:
                total += conv_and_norm(inputs, inner, 1) + conv_and_norm(inner, inner, 3)
                total += conv_and_norm(inner, outputs, 1)
            else:
                total += conv_and_norm(inputs, inner, 3) + conv_and_norm(inner, outputs, 3)
            if block == 0 and (stage > 0 or inputs != outputs):
                total += conv_and_norm(inputs, outputs, 1)
            inputs = outputs
    return total + inputs * classes + classes


@pytest.mark.parametrize(("depth", "known"), [(18, 11_173_962), (34, 21_282_122), (50, 23_520_842)])
def test_parameter_counts_are_the_published_ones(depth, known):
    assert models.build_resnet(depth, (32, 32, 3), 10).count_params() == known
    assert count_parameters(depth, 3, 10, 64) == known


@pytest.mark.parametrize(
    ("depth", "shape", "classes", "width"),
    [(18, (28, 28, 1), 62, 16), (34, (8, 8, 1), 11, 4), (50, (9, 13, 3), 100, 5)],
)
def test_other_sizes(depth, shape, classes, width):
    model = models.build_resnet(depth, shape, classes, width=width)
    assert model.count_params() == count_parameters(depth, shape[-1], classes, width)
    assert model.output_shape == (None, classes)
    logits = model(np.random.default_rng(0).random((3, *shape), np.float32)).numpy()
    assert np.isfinite(logits).all()
    assert (np.ptp(logits, axis=0) > 0.01).all()  # Even 8 px images keep their differences.


def test_stages_halve_the_image_from_the_second_on():
    model = models.build_resnet(18, (64, 64, 3), 10, width=4)
    sides = [layer.output_shape[1] for layer in model.layers if isinstance(layer, GroupNorm)]
    blocks_and_shortcut = 2 * 2 + 1
    assert sides == [64] * 5 + sum(([side] * blocks_and_shortcut for side in (32, 16, 8)), [])


def test_logits_of_an_image_do_not_depend_on_the_batch():
    model = models.build_resnet(18, (12, 12, 3), 10, width=8)
    images = np.random.default_rng(1).random((6, 12, 12, 3), np.float32)
    changed = images.copy()
    changed[1:] = 5 * changed[1:] - 7
    together = model(images, training=True).numpy()
    np.testing.assert_allclose(model(images[:1]).numpy()[0], together[0], atol=1e-5)
    np.testing.assert_allclose(model(changed, training=True).numpy()[0], together[0], atol=1e-5)
    assert np.abs(together[0] - together[1]).max() > 1e-3


@pytest.mark.parametrize("channels", [1, 2, 3, 5, 12, 16, 48, 64, 100, 512, 2048])
@pytest.mark.parametrize("side", [1, 2, 32])
def test_groups_divide_the_channels_and_hold_enough_values(side, channels):
    groups = _num_groups(side, side, channels)
    assert 1 <= groups <= 32
    assert channels % groups == 0
    if groups > 1:
        assert channels // groups >= 2
        assert side * side * channels // groups >= 16


def test_the_full_width_has_the_usual_32_groups_at_any_size():
    for side in (8, 32, 64):
        for stage in range(4):
            pixels = -(-side // 2**stage)
            assert _num_groups(pixels, pixels, 64 * 2**stage) == 32


def numpy_group_norm(x, groups, gamma, beta, epsilon):
    batch, height, width, channels = x.shape
    split = x.reshape(batch, height * width, groups, channels // groups)
    mean = split.mean(axis=(1, 3), keepdims=True)
    variance = ((split - mean) ** 2).mean(axis=(1, 3), keepdims=True)
    return ((split - mean) / np.sqrt(variance + epsilon)).reshape(x.shape) * gamma + beta


@pytest.mark.parametrize(("groups", "channels"), [(1, 6), (3, 6), (6, 6), (4, 8)])
def test_group_norm_is_numpys(groups, channels):
    rng = np.random.default_rng(groups)
    x = rng.normal(3.0, 2.0, (4, 5, 3, channels))
    gamma, beta = rng.normal(size=channels), rng.normal(size=channels)
    layer = GroupNorm(groups, epsilon=1e-3)
    layer.build(x.shape)
    layer.set_weights([gamma, beta])
    expected = numpy_group_norm(x, groups, gamma, beta, 1e-3)
    np.testing.assert_allclose(layer(x.astype(np.float32)).numpy(), expected, atol=2e-5)


def test_group_norm_gradients_are_those_of_keras():
    rng = np.random.default_rng(0)
    x, upstream = (tf.constant(rng.normal(size=(2, 4, 4, 6)), tf.float32) for _ in range(2))
    gradients = []
    for layer in (GroupNorm(3), tf.keras.layers.GroupNormalization(3, epsilon=1e-5)):
        layer.build(x.shape)
        layer.set_weights([np.linspace(0.5, 2, 6), np.linspace(-1, 1, 6)])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(upstream * layer(x))
        gradients.append(tape.gradient(loss, [x, *layer.trainable_weights]))
    for ours, keras in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, keras, atol=2e-5)


def test_initial_weights_follow_he_and_differ_between_layers():
    model = models.build_resnet(18, (32, 32, 3), 10, seed=3)
    kernels = [w.numpy() for w in model.trainable_weights if w.shape.rank == 4]
    for kernel in kernels:
        fan_in = np.prod(kernel.shape[:3])
        assert kernel.std() == pytest.approx(np.sqrt(2 / fan_in), rel=0.1)
    same_shape = [k for k in kernels if k.shape == (3, 3, 64, 64)]
    assert len(same_shape) == 4
    assert not np.array_equal(same_shape[0], same_shape[1])


def test_the_short_resnet_of_other_tests_has_every_kind_of_layer():
    def layers(model):
        kinds = ((type(layer), layer.get_config()) for layer in model.layers)
        return {(kind, config.get("kernel_size"), config.get("strides")) for kind, config in kinds}

    whole = models.build_resnet(18, (8, 8, 3), 4, width=4)
    short = build_short_resnet((8, 8, 3), 4, width=4)
    assert layers(short) == layers(whole)
    assert len(short.layers) < len(whole.layers) / 2


HASH = """
import hashlib, sys
from tff_fedlabel import models
from tff_fedlabel.models import resnet
resnet._ARCHITECTURES[18] = ((1, 1), False)
for build in (models.build_cnn, models.MODELS["resnet18"]):
    model = build((8, 8, 1), 10, width=4, seed=int(sys.argv[1]))
    print(hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest())
"""


def test_a_seed_fixes_the_weights_to_the_bit_in_any_process():
    def here(build, seed):
        build((8, 8, 1), 10, width=4, seed=99)  # Earlier models change nothing.
        weights = build((8, 8, 1), 10, width=4, seed=seed).get_weights()
        return hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()

    # As a user's process starts; ours has chosen Keras 2 for its children, too.
    environment = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    there = subprocess.run(
        [sys.executable, "-c", HASH, "7"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    ).stdout.split()
    for build, expected in zip((models.build_cnn, build_short_resnet), there, strict=True):
        assert here(build, 7) == expected
        assert here(build, 8) != expected


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((20, (32, 32, 3), 10), "depth"),
        ((18, (7, 32, 3), 10), "8 to 256"),
        ((18, (32, 257, 3), 10), "8 to 256"),
        ((18, (32, 32, 2), 10), "channels"),
        ((18, (32, 32), 10), "input_shape"),
        ((18, (32, 32, 3), 1), "num_classes"),
        ((18, (32, 32, 3), 10, 0), "width"),
        (([18], (32, 32, 3), 10), "depth"),
        ((18, (32, 32, "3"), 10), r"input_shape\[2\].*'3'"),
        ((18, "333", 10), "input_shape.*'333'"),
        ((18, (32, 32, 3), 10.0), "num_classes.*10.0"),
        ((18, (32, 32, 3), 10, 4, -1), "seed.*-1"),
    ],
)
def test_bad_arguments_are_named(arguments, word):
    with pytest.raises(ValueError, match=word) as error:
        models.build_resnet(*arguments)
    assert len(str(error.value).splitlines()) == 1


def test_numbers_may_be_numpys():
    ours = models.build_resnet(
        np.int64(18), np.int32([8, 8, 1]), np.int8(3), np.uint8(4), np.int64(5)
    )
    expected = models.build_resnet(18, (8, 8, 1), 3, 4, 5)
    assert ours.name == expected.name
    for found, wanted in zip(ours.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(found, wanted)
