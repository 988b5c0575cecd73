"""What users give may hold Python's control flow over tensors; the package's own steps do not."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights
from test_contract import SERVER_LABELS

from tff_fedlabel import algorithms
from tff_fedlabel._autograph import as_written, given

Refused = tf.errors.OperatorNotAllowedInGraphError  # `if` over a tensor


def half_if_large(x):
    if tf.reduce_sum(x) > 10.0:
        x = x / 2.0
    return x


def twice(x):
    return half_if_large(half_if_large(x))


def test_only_what_is_given_is_converted():
    """Also what it calls, and eagerly both are the same."""

    @as_written
    def outer(x):
        return given(twice)(x)

    with pytest.raises(Refused):
        tf.function(as_written(twice)).get_concrete_function(tf.TensorSpec([2]))
    for value, expected in ((3.0, 3.0), (8.0, 4.0)):
        x = tf.constant([value, value])
        np.testing.assert_array_equal(tf.function(outer)(x), [expected, expected])
        np.testing.assert_array_equal(outer(x), [expected, expected])
        np.testing.assert_array_equal(as_written(twice)(x), [expected, expected])


def views(images, *, seed):
    flipped = images
    if seed[0] > 0:
        flipped = 1.0 - images
    return flipped


def confidence(probabilities):
    total = tf.zeros_like(probabilities[:, 0])
    for column in tf.range(tf.shape(probabilities)[1]):
        total += probabilities[:, column] ** 2
    return total


def model():
    plain = build_model(initial_weights())

    def loss(output, label, sample_weight=None):
        value = plain.loss(output, label, sample_weight)
        if value > 10.0:
            value = tf.constant(10.0)
        return value

    return tff.learning.models.FunctionalModel(
        initial_weights=plain.initial_weights,
        predict_on_batch_fn=tf.function(
            lambda weights, x, training: plain.predict_on_batch(weights, x, training)
        ),
        loss_fn=loss,
        input_spec=plain.input_spec,
    )


@pytest.mark.parametrize(
    "name,parameters",
    [
        ("fedlabel", {"strong_augment": views, "confidence": confidence}),
        ("fedavg_uda", {"strong_augment": views, "weak_augment": views}),
        ("semifl", {"strong_augment": views, "weak_augment": views}),
    ],
)
def test_loss_augmentation_and_confidence_may_have_control_flow(name, parameters):
    method = algorithms.METHODS[name]
    config = method.config_class(**parameters)
    tail = {"server_data": SERVER_LABELS} if method.server_training else {}
    process = method(model(), tff.learning.optimizers.build_sgdm(0.1), config, **tail)
    assert isinstance(process, tff.learning.templates.LearningProcess)
