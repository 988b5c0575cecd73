"""Frozen layers and layers with constant weights: what travels, what stays, what is refused."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from small_models import CLASSES, SHAPE, batch, classifier, sequential

from tff_fedlabel import models

L = tf.keras.layers
RATE = 0.2


def drawn_weights(keras_model):
    """Sets every weight to a draw of its own; variances and counts must not be negative."""
    rng = np.random.default_rng(1)
    keras_model.set_weights([0.1 + 0.1 * rng.random(w.shape) for w in keras_model.get_weights()])
    return keras_model


def batch_norm(x, gamma, beta, mean, variance, epsilon=1e-3):
    return (x - mean) / np.sqrt(variance + epsilon) * gamma + beta


def gradient_function(model):
    """A function of (trainable weights, other weights, images, labels)."""

    @tf.function
    def gradients(weights, others, x, y):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = model.loss(model.predict_on_batch((weights, others), x, training=True), y)
        return tape.gradient(loss, weights)

    return gradients


def one_step(model, x, y):
    weights = [tf.constant(w) for w in model.initial_weights[0]]
    gradients = gradient_function(model)(weights, model.initial_weights[1], x, y)
    return [w - RATE * g for w, g in zip(weights, gradients, strict=True)]


def keras_step(keras_model, x, y):
    """One step of Keras' own `fit`; returns the weights before it."""
    before = [w.numpy() for w in keras_model.trainable_weights]
    keras_model.compile(
        tf.keras.optimizers.SGD(RATE),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    keras_model.fit(np.float32(x) / 255, y, batch_size=len(x), shuffle=False, verbose=0)
    return before


def frozen_base():
    """A base whose layers are frozen by their parent, batch normalisation included."""
    base = sequential(L.Conv2D(3, 3, activation="relu"), L.BatchNormalization(), L.Conv2D(4, 3))
    base.trainable = False
    return sequential(base, *classifier())


def frozen_middle():
    return sequential(
        L.Conv2D(3, 3, activation="relu"), L.Conv2D(4, 3, trainable=False), *classifier()
    )


def frozen_batch_norm():
    return sequential(L.Conv2D(3, 3), L.BatchNormalization(trainable=False), *classifier())


def adapted_normalization():
    layer = L.Normalization()
    layer.adapt(np.random.default_rng(2).normal(0.5, 0.2, (50, *SHAPE)))
    return sequential(layer, *classifier())


class BaseInInferenceMode(tf.keras.Model):
    """Keras' guide to fine tuning: all of the base is trained, statistics stay."""

    def __init__(self):
        super().__init__()
        self.base = sequential(L.Conv2D(3, 3), L.BatchNormalization(), L.Flatten())
        self.head = L.Dense(CLASSES)

    def call(self, x):
        return self.head(self.base(x, training=False))


# Builder, and the shapes of the weights that travel untrained, in Keras' order.
BUILDERS = {
    "frozen base": (
        frozen_base,
        [(3, 3, 1, 3), (3,), (3,), (3,), (3,), (3,), (3, 3, 3, 4), (4,)],
    ),
    "frozen middle": (frozen_middle, [(3, 3, 3, 4), (4,)]),
    "frozen batch norm": (frozen_batch_norm, [(3,)] * 4),
    "batch norm in inference mode": (BaseInInferenceMode, [(3,), (3,)]),
    "normalization": (adapted_normalization, [(1,), (1,), ()]),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_step_is_that_of_keras_and_frozen_weights_stay(name):
    build, shapes = BUILDERS[name]
    keras_model = build()
    if not keras_model.built:
        keras_model(tf.zeros([1, *SHAPE]))
    if name != "normalization":  # What Keras has adapted stays.
        drawn_weights(keras_model)
    model = models.functional_model(keras_model, input_shape=SHAPE)
    for ours, keras in zip(
        model.initial_weights,
        (keras_model.trainable_weights, keras_model.non_trainable_weights),
        strict=True,
    ):
        for value, variable in zip(ours, keras, strict=True):
            assert type(value) is np.ndarray and value.dtype == variable.dtype.as_numpy_dtype
            np.testing.assert_array_equal(value, variable)
    assert [w.shape for w in model.initial_weights[1]] == shapes

    x, y = batch()
    stepped = one_step(model, x, y)
    for training in (False, True):
        logits = model.predict_on_batch(model.initial_weights, x, training=training)
        expected = keras_model(np.float32(x) / 255, training=training)
        np.testing.assert_allclose(logits, expected, atol=1e-4)
    before = keras_step(keras_model, x, y)
    for ours, old, keras in zip(stepped, before, keras_model.trainable_weights, strict=True):
        np.testing.assert_allclose(ours, keras, atol=1e-4)
        assert np.abs(keras - old).max() > 1e-3
    for ours, keras in zip(
        model.initial_weights[1], keras_model.non_trainable_weights, strict=True
    ):
        np.testing.assert_array_equal(ours, keras)


def test_frozen_batch_norm_is_numpys_with_the_statistics_it_is_given():
    keras_model = sequential(L.BatchNormalization(trainable=False), *classifier())
    model = models.functional_model(keras_model, input_shape=SHAPE)
    rng = np.random.default_rng(3)
    others = [np.float32(v) for v in rng.random((4, 1)) + 0.2]
    weights = [np.float32(rng.normal(size=size)) for size in ((64, CLASSES), CLASSES)]
    x, _ = batch()
    expected = batch_norm(x / 255, *others).reshape(6, -1) @ weights[0] + weights[1]
    for training in (False, True):
        logits = model.predict_on_batch((weights, others), x, training=training)
        np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("shape", [(1,), SHAPE, (16, 16, 3)])
def test_normalization_is_numpys(shape):
    """By a pixel's channel and by pixel, of which there are more than TensorFlow copies."""
    rng = np.random.default_rng(4)
    image_shape = shape if len(shape) == 3 else SHAPE
    mean, variance = rng.random(shape), 0.5 + rng.random(shape)
    x = rng.integers(0, 256, (5, *image_shape)).astype(np.uint8)
    flat = ((x / 255 - mean) / np.sqrt(variance)).reshape(5, -1)
    axis = -1 if len(shape) == 1 else (1, 2, 3)

    def build(**options):
        return tf.keras.Sequential(
            [L.InputLayer(image_shape), L.Normalization(axis=axis, **options), *classifier()]
        )

    given = models.functional_model(build(mean=mean, variance=variance), input_shape=image_shape)
    assert given.initial_weights[1] == ()
    kernel, bias = given.initial_weights[0]
    logits = given.predict_on_batch(given.initial_weights, x)
    np.testing.assert_allclose(logits, flat @ kernel + bias, atol=1e-4)

    plain = models.functional_model(build(), input_shape=image_shape)
    kernel, bias = plain.initial_weights[0]
    logits = plain.predict_on_batch(plain.initial_weights, x)
    np.testing.assert_allclose(logits, (x / 255).reshape(5, -1) @ kernel + bias, atol=1e-4)
    others = np.float32(mean), np.float32(variance), np.int64(7)
    logits = plain.predict_on_batch(((kernel, bias), others), x)
    np.testing.assert_allclose(logits, flat @ kernel + bias, atol=1e-4)


def test_a_normalization_stays_as_it_was():
    keras_model = adapted_normalization()
    x = np.float32(batch()[0]) / 255
    before = keras_model(x).numpy()
    models.functional_model(keras_model, input_shape=SHAPE)
    np.testing.assert_array_equal(keras_model(x), before)
    assert isinstance(keras_model.layers[0].adapt_mean, tf.Variable)
    assert hasattr(keras_model.layers[0].mean, "numpy")


def test_nothing_is_computed_for_the_gradients_of_a_frozen_base():
    def counts(trainable):
        base = sequential(L.Conv2D(3, 3), L.Conv2D(4, 3))
        base.trainable = trainable
        model = models.functional_model(
            sequential(base, L.Conv2D(5, 3), *classifier()), input_shape=SHAPE
        )
        specs = [
            tuple(tf.TensorSpec(w.shape, w.dtype) for w in part) for part in model.initial_weights
        ]
        graph = gradient_function(model).get_concrete_function(*specs, *model.input_spec.values())
        definition = graph.graph.as_graph_def()
        nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
        ops = collections.Counter(node.op for node in nodes)
        return ops["Conv2DBackpropFilter"], ops["Conv2DBackpropInput"]

    filters, inputs = counts(trainable=False)
    all_filters, all_inputs = counts(trainable=True)
    # Of three layers one is left; TensorFlow drops its unused gradient of the input later.
    assert 3 * filters == all_filters > 0
    assert 3 * inputs == all_inputs > 0


def test_tff_averages_the_head_and_leaves_the_base(local_runtime):
    keras_model = drawn_weights(frozen_base())
    model = models.functional_model(keras_model, input_shape=SHAPE)
    process = tff.learning.algorithms.build_weighted_fed_avg(
        model, tff.learning.optimizers.build_sgdm(RATE)
    )
    x, y = batch()
    data = tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y)).batch(len(x))
    state = process.next(process.initialize(), [data]).state
    weights = process.get_model_weights(state)
    keras_step(keras_model, x, y)
    for ours, keras in zip(weights.trainable, keras_model.trainable_weights, strict=True):
        np.testing.assert_allclose(ours, keras, atol=1e-4)
    assert len(weights.non_trainable) == 8
    for ours, keras in zip(weights.non_trainable, keras_model.non_trainable_weights, strict=True):
        np.testing.assert_array_equal(ours, keras)


class Counter(L.Layer):
    """Counts its calls in a weight."""

    def build(self, input_shape):
        self.calls = self.add_weight("calls", [], initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


class Scatters(Counter):
    def build(self, input_shape):
        self.calls = self.add_weight("calls", [3], initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.scatter_update(tf.IndexedSlices([1.0], [0]))
        return x


def moving_batch_norm_in_a_frozen_parent():
    """`trainable` counts where it stands: Keras moves these statistics."""
    base = sequential(L.Conv2D(3, 3), L.BatchNormalization())
    base.trainable = False
    base.layers[-1].trainable = True
    return sequential(base, *classifier())


def batch_norm_added_to_a_frozen_parent():
    base = tf.keras.Sequential([L.InputLayer(SHAPE), L.Conv2D(3, 3)])
    base.trainable = False
    base.add(L.BatchNormalization())
    return sequential(base, *classifier())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: sequential(L.BatchNormalization(name="b"), *classifier()), "'b'.*GroupNorm"),
        (lambda: sequential(sequential(L.BatchNormalization()), *classifier()), "GroupNorm"),
        (lambda: sequential(L.BatchNormalization(fused=False), *classifier()), "freeze"),
        (lambda: sequential(L.BatchNormalization(synchronized=True), *classifier()), "freeze"),
        (moving_batch_norm_in_a_frozen_parent, "freeze"),
        (batch_norm_added_to_a_frozen_parent, "freeze"),
        (lambda: sequential(Counter(name="c"), *classifier()), "'c' changes a weight"),
        (lambda: sequential(Scatters(name="c"), *classifier()), "'c' changes a weight"),
    ],
)
def test_weights_that_change_are_refused(build, words):
    keras_model = build()
    with pytest.raises(models.BatchNormError, match=words) as error:
        models.functional_model(keras_model, input_shape=SHAPE)
    assert isinstance(error.value, ValueError)
    assert len(str(error.value).splitlines()) == 1
    # The refusal has left the Keras model whole.
    assert keras_model(np.float32(batch()[0]) / 255, training=True).shape == (6, CLASSES)


def test_what_only_variables_have_is_refused_in_one_line():
    class Reads(L.Layer):
        def build(self, input_shape):
            self.factor = self.add_weight("factor", [])

        def call(self, x):
            return x * self.factor.read_value()

    with pytest.raises(ValueError, match=r"'r' uses \.read_value.*convert_to_tensor") as error:
        models.functional_model(sequential(Reads(name="r"), *classifier()), input_shape=SHAPE)
    assert len(str(error.value).splitlines()) == 1


def test_a_model_with_nothing_to_train_is_refused():
    keras_model = sequential(*classifier())
    keras_model.trainable = False
    with pytest.raises(ValueError, match="no trainable weights.*frozen"):
        models.functional_model(keras_model, input_shape=SHAPE)
