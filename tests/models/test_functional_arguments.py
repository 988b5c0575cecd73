"""Keras models as FunctionalModels: what is taken, and what is refused in one line."""

import numpy as np
import pytest
import tensorflow as tf
from small_models import CLASSES, SHAPE, dense_model

from tff_fedlabel import models

L = tf.keras.layers


def model_with_a_variable_outside_its_layers():
    variable = tf.Variable(1.0)
    return dense_model(L.Lambda(lambda x: x * variable))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: tf.keras.Sequential([L.Flatten(), L.Dense(5, "softmax")]), "softmax.*remove"),
        (lambda: tf.keras.Sequential([L.Flatten(), L.Dense(5), L.Softmax()]), "softmax.*remove"),
        (lambda: tf.keras.Sequential([L.Flatten(), L.Dense(5, "sigmoid")]), "sigmoid.*remove"),
        (lambda: dense_model(L.Conv2D(2, 3, kernel_regularizer="l2")), "regularisers"),
        (lambda: dense_model(L.Conv2D(2, 3, activity_regularizer="l2")), "regularisers"),
        (lambda: dense_model(L.Rescaling(1 / 255)), r"already.*remove"),
        (lambda: tf.keras.Sequential([L.Conv2D(2, 3)]), r"\[batch, classes\]"),
        (lambda: tf.keras.Sequential([L.Flatten(), L.Dense(1)]), r"\[batch, classes\]"),
        (lambda: tf.keras.Sequential([L.Flatten()]), "no trainable weights"),
        (lambda: models.build_cnn((9, 9, 1), 5), r"\(None, 9, 9, 1\).*\(8, 8, 1\)"),
        (lambda: tf.keras.Sequential([L.Conv2D(2, 20)]), r"\(8, 8, 1\).*<= 0"),
        (model_with_a_variable_outside_its_layers, "add_weight"),
        (lambda: "cnn", "return a tf.keras.Model"),
    ],
)
def test_models_that_do_not_fit_are_refused_in_one_line(build, words):
    with pytest.raises(ValueError, match=words) as error:
        models.functional_model(build, input_shape=SHAPE)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("keras_model", "options", "words"),
    [
        (dense_model, {"num_classes": 9}, "outputs 5 logits.* 9"),
        (dense_model, {"num_classes": 1}, "num_classes.*2 or more or None, got 1"),
        (dense_model, {"num_classes": "5"}, "num_classes.*'5'"),
        (dense_model, {"input_dtype": tf.int32}, "input_dtype.*int32"),
        (dense_model, {"input_dtype": "pixels"}, "input_dtype.*'pixels'"),
        (dense_model, {"input_shape": (8, 8)}, r"input_shape.*\(8, 8\)"),
        (dense_model, {"input_shape": 8}, "input_shape.*got 8"),
        (dense_model, {"input_shape": (8, None, 1)}, r"input_shape\[1\].*None"),
        (dense_model, {"input_shape": (8, 8, 0)}, r"input_shape\[2\].*0"),
        ("cnn", {}, "keras_model.*str"),
    ],
)
def test_wrong_arguments_are_refused(keras_model, options, words):
    with pytest.raises(ValueError, match=words) as error:
        models.functional_model(keras_model, **{"input_shape": SHAPE} | options)
    assert len(str(error.value).splitlines()) == 1


def test_arguments_may_be_numpys():
    spec = models.functional_model(
        dense_model, input_shape=np.int64(SHAPE), input_dtype=np.float32, num_classes=np.int8(5)
    ).input_spec
    assert spec["x"] == tf.TensorSpec([None, *SHAPE], tf.float32)


def test_models_of_more_than_one_input_or_output_are_refused():
    images = tf.keras.Input(SHAPE)
    logits = L.Dense(CLASSES)(L.Flatten()(images))
    with pytest.raises(ValueError, match="one output"):
        models.functional_model(tf.keras.Model(images, [logits, logits]), input_shape=SHAPE)
    with pytest.raises(ValueError, match="one input"):
        models.functional_model(
            tf.keras.Model([images, tf.keras.Input(SHAPE)], logits), input_shape=SHAPE
        )
