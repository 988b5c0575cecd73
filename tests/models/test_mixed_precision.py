"""Models under Keras' mixed precision policies, against float32, NumPy and exact powers of two."""

import numpy as np
import pytest
import tensorflow as tf
from numpy_reference import softmax

from tff_fedlabel import models
from tff_fedlabel.models import _loss_scaling, _stateless
from tff_fedlabel.models._group_norm import GroupNorm
from tff_fedlabel.models._loss_scaling import with_loss_scaling

L = tf.keras.layers
SHAPE = (8, 8, 1)
CLASSES = 5
# Of numbers of the size 1: 8 and 11 bits.
ROUNDING = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}
both_policies = pytest.mark.parametrize("policy", ROUNDING, indirect=True)
float16 = pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)


def dtypes_in(function):
    """Names of all dtypes of tensors in the graph of a concrete function and in those it calls."""
    definition = function.graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    attributes = [attr for node in nodes for attr in node.attr.values()]
    numbers = {attr.type for attr in attributes} | {t for a in attributes for t in a.list.type}
    return {tf.as_dtype(number).name for number in numbers - {0}}


def gradient_graph(model):
    """A concrete function of weights, images and labels, in which gradients are taken."""

    @tf.function
    def gradients(weights, x, y):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = model.loss(model.predict_on_batch((weights, ()), x, training=True), y)
        return tape.gradient(loss, weights)

    specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in model.initial_weights[0])
    x, y = model.input_spec.values()
    return gradients.get_concrete_function(specs, x, y)


@both_policies
@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_our_models_are_close_to_float32_and_end_in_float32(name, policy):
    x = np.random.default_rng(0).random((4, 16, 16, 3), np.float32)
    half = models.build_keras(name, x.shape[1:], CLASSES, width=4)
    assert half.layers[1].compute_dtype == policy.removeprefix("mixed_")
    tf.keras.mixed_precision.set_global_policy("float32")
    full = models.build_keras(name, x.shape[1:], CLASSES, width=4)
    for ours, expected in zip(half.get_weights(), full.get_weights(), strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, expected)
    ours, expected = half(x), full(x).numpy()
    assert ours.dtype == tf.float32
    assert not np.array_equal(ours, tf.cast(tf.cast(ours, half.layers[1].compute_dtype), "float32"))
    # A few roundings, one after the other; a resnet has 20 layers.
    assert 0 < np.abs(ours - expected).max() < 16 * ROUNDING[policy] * np.abs(expected).max()


@both_policies
def test_group_norm_takes_its_statistics_in_float32(policy):
    """Images whose mean is 100 deviations: in 16 bits, nothing is left of the deviation."""
    rng = np.random.default_rng(0)
    x = rng.normal(50, 0.5, (3, 32, 32, 4))
    x = tf.cast(x, policy.removeprefix("mixed_"))
    layer = GroupNorm(2, epsilon=1e-3)
    layer.build(x.shape)
    gamma, beta = rng.normal(size=4), rng.normal(size=4)
    layer.set_weights([gamma, beta])
    outputs = layer(x)
    assert outputs.dtype == x.dtype

    groups = tf.cast(x, tf.float64).numpy().reshape(3, 32 * 32, 2, 2)
    mean = groups.mean(axis=(1, 3), keepdims=True)
    variance = groups.var(axis=(1, 3), keepdims=True)
    normalised = ((groups - mean) / np.sqrt(variance + 1e-3)).reshape(x.shape)
    expected = normalised * gamma + beta
    atol = 2e-5 + ROUNDING[policy] * np.abs(expected).max()
    np.testing.assert_allclose(tf.cast(outputs, tf.float64), expected, atol=atol, rtol=0)


@both_policies
def test_the_policy_of_a_single_layer(policy):
    """Other layers compute in float32, and so do weights that Keras does not cast."""

    class Shift(L.Layer):
        def build(self, input_shape):
            self.shift = self.add_weight("shift", [CLASSES], experimental_autocast=False)
            self.factor = self.add_weight("factor", [CLASSES], initializer="ones")

        def call(self, x):
            shift, factor = tf.convert_to_tensor(self.shift), tf.convert_to_tensor(self.factor)
            assert (shift.dtype, factor.dtype) == (tf.float32, x.dtype)
            return x * factor + tf.cast(shift, x.dtype)

    tf.keras.mixed_precision.set_global_policy("float32")
    keras_model = tf.keras.Sequential(
        [L.InputLayer(SHAPE), L.Flatten(), L.Dense(CLASSES), Shift(dtype=policy)]
    )
    model = models.functional_model(keras_model, input_shape=SHAPE)
    weights = [np.random.default_rng(1).normal(size=w.shape) for w in model.initial_weights[0]]
    x = np.random.default_rng(0).random((3, *SHAPE), np.float32)
    kernel, bias, shift, factor = weights
    expected = (x.reshape(3, -1) @ kernel + bias) * factor + shift
    logits = model.predict_on_batch(([np.float32(w) for w in weights], ()), x, training=False)
    assert logits.dtype == tf.float32
    error = np.abs(logits - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < 4 * ROUNDING[policy]


def test_a_float32_model_has_no_operation_in_16_bits():
    def build():
        return tf.keras.Sequential(
            [L.Conv2D(4, 3), GroupNorm(2), L.Dropout(0.1), L.Flatten(), L.Dense(CLASSES)]
        )

    def graph():
        return gradient_graph(models.functional_model(build, input_shape=SHAPE))

    full = graph()
    assert dtypes_in(full).isdisjoint({"float16", "bfloat16"})
    assert not [op for op in full.graph.get_operations() if op.type in ("IdentityN", "While")]
    for name in ("float16", "bfloat16"):  # The search would find them.
        tf.keras.mixed_precision.set_global_policy(f"mixed_{name}")
        try:
            half = graph()
        finally:
            tf.keras.mixed_precision.set_global_policy("float32")
        assert name in dtypes_in(half)
        assert [weight.dtype for weight in half.structured_outputs] == [tf.float32] * 6


@pytest.mark.parametrize("policy", ["float16", "bfloat16"], indirect=True)
def test_weights_of_16_bits_are_refused(policy):
    with pytest.raises(ValueError, match=f"is {policy}.*'mixed_{policy}'") as error:
        models.functional_model(lambda: models.build_cnn(SHAPE, CLASSES, 4), input_shape=SHAPE)
    assert len(str(error.value).splitlines()) == 1


@float16
@pytest.mark.parametrize(
    ("last", "words"),
    [
        (lambda: [L.Dense(5, "softmax")], "softmax.*remove"),
        (lambda: [L.Dense(5), L.Activation("sigmoid", dtype="float32")], "sigmoid.*remove"),
        (lambda: [L.Dense(5), L.Lambda(_times_a_variable())], "add_weight"),
    ],
)
def test_models_that_do_not_fit_are_refused_as_in_float32(last, words, policy):
    with pytest.raises(ValueError, match=words) as error:
        models.functional_model(
            lambda: tf.keras.Sequential([L.InputLayer(SHAPE), L.Flatten(), *last()]),
            input_shape=SHAPE,
        )
    assert len(str(error.value).splitlines()) == 1


def _times_a_variable():
    variable = tf.Variable(1.0)
    return lambda x: x * tf.cast(variable, x.dtype)


@both_policies
def test_dropout_drops_what_it_drops_in_float32(policy):
    """A rate of 1%, for which bfloat16 has no random numbers."""
    kept = []
    for name in (policy, "float32"):
        tf.keras.mixed_precision.set_global_policy(name)
        layers = [L.Flatten(), L.Lambda(lambda x: tf.tile(x, [1, 256])), L.Dropout(0.01)]
        ends = [L.Lambda(lambda x: tf.reshape(x, [-1, 4, 4096])), L.Permute((2, 1))]
        model = models.functional_model(
            tf.keras.Sequential([*layers, *ends, L.Dense(1), L.Flatten()]), input_shape=SHAPE
        )
        weights = ((np.float32([[1], [0], [0], [0]]), np.float32([0])), ())
        x = np.full((4, *SHAPE), 255, np.uint8)
        kept.append(model.predict_on_batch(weights, x, training=True).numpy() > 0)
    np.testing.assert_array_equal(*kept)
    deviation = np.sqrt(0.01 * 0.99 / kept[0].size)
    assert np.mean(~kept[0]) == pytest.approx(0.01, abs=5 * deviation)


def gradient_errors(policy, before, after):
    """Relative errors, against NumPy, of the gradients of a linear model between two factors.

    Those of two kernels and a bias. The loss is 2^-10 of the cross-entropy.
    """
    rng = np.random.default_rng(0)
    tf.keras.mixed_precision.set_global_policy(policy)
    kernels = [tf.keras.initializers.GlorotUniform(seed) for seed in (0, 1)]
    layers = [L.Flatten(), L.Dense(8, use_bias=False, kernel_initializer=kernels[0])]
    layers += [L.Lambda(lambda x: x * before), L.Dense(CLASSES, kernel_initializer=kernels[1])]
    layers += [L.Lambda(lambda x: x * after)]
    model = models.functional_model(tf.keras.Sequential(layers), input_shape=SHAPE)
    x = tf.constant(rng.random((6, *SHAPE)), tf.float32)
    y = rng.integers(0, CLASSES, 6).astype(np.int32)
    weights = tuple(tf.constant(w) for w in model.initial_weights[0])
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = model.loss(model.predict_on_batch((weights, ()), x, training=True), y) * 2.0**-10
    found = tape.gradient(loss, weights)

    pixels = x.numpy().reshape(6, -1)
    first, second = weights[0].numpy(), weights[1].numpy()
    features = before * pixels @ first
    errors = (softmax(features @ second * after) - np.eye(CLASSES)[y]) * after / 6 * 2.0**-10
    of_first = before * pixels.T @ (errors @ second.T)
    expected = of_first, features.T @ errors, errors.sum(axis=0)
    assert {gradient.dtype for gradient in found} == {tf.float32}
    return [np.linalg.norm(f - e) / np.linalg.norm(e) for f, e in zip(found, expected, strict=True)]


VANISHING = (1.0, 2.0**-12)
# Between the factors, gradients are 2^14 times those of the logits.
OVERFLOWING = (2.0**-14, 2.0**14)


@pytest.mark.parametrize("factors", [VANISHING, (1.0, 1.0), OVERFLOWING])
@both_policies
def test_gradients_neither_vanish_nor_overflow(factors, policy):
    # TensorFlow 2.14 adds up in 16 bits; gradients that vanished would be off by 1.
    assert max(gradient_errors(policy, *factors)) < 8 * ROUNDING[policy]


@float16
def test_without_loss_scaling_gradients_vanish(policy, monkeypatch):
    monkeypatch.setattr(_stateless, "with_loss_scaling", lambda function: function)
    assert min(gradient_errors(policy, *VANISHING)) > 0.9  # Zeros would give 1.


@float16
def test_without_another_attempt_gradients_overflow(policy, monkeypatch):
    monkeypatch.setattr(_loss_scaling, "_ATTEMPTS", 1)
    assert not np.isfinite(gradient_errors(policy, *OVERFLOWING)).any()


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("upstream", [np.nan, np.inf, 0.0, 1e-30, 1e30])
def test_scaled_back_whatever_arrives_at_the_logits(upstream, in_graph):
    function = with_loss_scaling(lambda w: tf.cast(w, tf.float16) * 0.5)

    def gradient(w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = function(w)[0] * upstream
        return tape.gradient(loss, w)

    found = (tf.function(gradient) if in_graph else gradient)(tf.constant([3.0, 4.0]))
    if np.isfinite(upstream):
        np.testing.assert_allclose(found, [0.5 * upstream, 0], rtol=2**-11)
    else:
        assert not np.isfinite(found).all()
