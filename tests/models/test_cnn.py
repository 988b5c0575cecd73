"""The small CNN: shapes, the layers it is made of, and that it learns real digits."""

import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from tff_fedlabel import models


@pytest.mark.parametrize("shape", [(8, 8, 1), (9, 15, 3), (28, 28, 1), (64, 64, 3)])
@pytest.mark.parametrize("width", [4, 32])
def test_shapes_and_parameter_count(shape, width):
    height, image_width, channels = shape
    flat = -(-height // 4) * -(-image_width // 4) * 2 * width
    expected = (9 * channels + 1) * width + (9 * width + 1) * 2 * width
    expected += (flat + 1) * 128 + (128 + 1) * 7
    model = models.build_cnn(shape, 7, width=width)
    assert model.count_params() == expected
    assert model(np.zeros((2, *shape), np.float32)).shape == (2, 7)


def numpy_conv_relu(x, kernel, bias):
    """3x3, stride 2; on an even side "same" pads one row after the image and none before."""
    padded = np.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))[:, ::2, ::2]
    return np.maximum(np.einsum("nhwcij,ijcd->nhwd", windows, kernel) + bias, 0)


def test_forward_pass_is_numpys():
    model = models.build_cnn((8, 8, 3), 5, width=4, seed=1)
    rng = np.random.default_rng(0)
    weights = [w + 0.1 * rng.normal(size=w.shape) for w in model.get_weights()]
    model.set_weights(weights)
    x = rng.random((3, 8, 8, 3))
    y = numpy_conv_relu(numpy_conv_relu(x, *weights[0:2]), *weights[2:4])
    y = np.maximum(y.reshape(3, -1) @ weights[4] + weights[5], 0)
    expected = y @ weights[6] + weights[7]
    np.testing.assert_allclose(model(x.astype(np.float32)).numpy(), expected, atol=1e-4)


def test_learns_real_digits():
    images, labels = load_digits(return_X_y=True)
    x = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:1400], order[1400:]
    model = models.build_cnn((8, 8, 1), 10, width=16)
    model.compile(
        tf.keras.optimizers.SGD(0.05, momentum=0.9),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    tf.keras.utils.set_random_seed(0)
    model.fit(x[train], labels[train], batch_size=32, epochs=6, verbose=0)
    accuracy = (model.predict(x[test], verbose=0).argmax(-1) == labels[test]).mean()
    assert accuracy >= 0.95


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (((28, 28, 4), 10), "channels"),
        (((4, 28, 1), 10), "8 to 256"),
        (((28, 28, 1), 0), "num_classes"),
        (((28, 28, 1), 10, -1), "width"),
    ],
)
def test_bad_arguments_are_named(arguments, word):
    with pytest.raises(ValueError, match=word):
        models.build_cnn(*arguments)
