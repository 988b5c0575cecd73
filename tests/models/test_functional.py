"""Keras models as FunctionalModels: values, gradients, metrics, and inside TFF."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from short_resnet import build_short_resnet
from small_models import CLASSES, SHAPE, dense_model

from tff_fedlabel import models
from tff_fedlabel.models._group_norm import GroupNorm

L = tf.keras.layers


def random_bytes(n, seed=0, shape=SHAPE):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape)).astype(np.uint8)


def random_labels(n, seed=0):
    return np.random.default_rng(seed).integers(0, CLASSES, n).astype(np.int32)


def numpy_losses(logits, labels):
    shifted = np.float64(logits) - np.max(logits, axis=1, keepdims=True)
    log_sums = np.log(np.exp(shifted).sum(axis=1))
    return log_sums - shifted[np.arange(len(labels)), labels]


class Weighted(L.Layer):
    """Holds weights in an attribute, a list and a dict, as layers may."""

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", [64, CLASSES])
        self.kernels = [self.add_weight(f"kernel_{i}", [64, CLASSES]) for i in range(2)]
        self.biases = {"only": self.add_weight("bias", [CLASSES])}

    def call(self, x):
        products = (x @ self.kernels[0]) * (x @ self.kernels[1])
        return x @ self.kernel + products + self.biases["only"]


class Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.stack = [L.Conv2D(4, 3, activation="swish"), L.Flatten(), L.Dense(CLASSES)]
        self.shift = self.add_weight("shift", [CLASSES], initializer="ones")

    def call(self, x):
        for layer in self.stack:
            x = layer(x)
        return x + self.shift


def attention_model():
    images = tf.keras.Input(SHAPE)
    rows = L.Reshape((8, 8))(images)
    rows = L.LayerNormalization()(rows + L.MultiHeadAttention(2, 4)(rows, rows))
    return tf.keras.Model(images, L.Dense(CLASSES)(L.Flatten()(rows)))


def shared_layer_model():
    shared = L.Conv2D(1, 3, padding="same", activation="relu")
    return dense_model(shared, L.ReLU(), shared)


BUILDERS = {
    "cnn": lambda: models.build_cnn(SHAPE, CLASSES, width=4),
    "resnet": lambda: build_short_resnet(SHAPE, CLASSES, width=4),
    "keras group norm": lambda: dense_model(L.Conv2D(4, 3), L.GroupNormalization(2)),
    "subclassed": Subclassed,
    "attention": attention_model,
    "recurrent": lambda: tf.keras.Sequential([L.Reshape((8, 8)), L.GRU(3), L.Dense(CLASSES)]),
    "weights in containers": lambda: tf.keras.Sequential([L.Flatten(), Weighted()]),
    "shared layer": shared_layer_model,
}


# How far logits may be off, relative to the largest, and gradients, relative to the norm of all of
# them: one rounding. Keras computes eagerly here and ours is a graph, but the operations are the
# same. A processor that multiplies bfloat16 itself has operations of a graph fused, which leaves
# out some roundings, and a ReLU may then fall on the other side of zero.
TOLERANCES = {
    "float32": (5e-6, 0.0),
    "mixed_bfloat16": (2**-6, 2**-3),
    "mixed_float16": (2**-11, 2**-11),
}


@pytest.mark.parametrize("policy", TOLERANCES, indirect=True)
@pytest.mark.parametrize("name", BUILDERS)
def test_logits_and_gradients_are_those_of_keras(name, policy):
    keras_model = BUILDERS[name]()
    model = models.functional_model(keras_model, input_shape=SHAPE, num_classes=CLASSES)
    # Other weights than the initial ones: the function must use those it is given.
    rng = np.random.default_rng(1)
    weights = [w + np.float32(0.05) * rng.normal(size=w.shape) for w in model.initial_weights[0]]
    weights = [tf.constant(w, tf.float32) for w in weights]
    x, y = random_bytes(6), random_labels(6)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        logits = model.predict_on_batch((weights, ()), x, training=True)
        loss = model.loss(logits, y)
    gradients = tape.gradient(loss, weights)

    keras_model.set_weights(weights)
    scale = 1024.0  # As users of Keras' float16 scale the loss themselves.
    with tf.GradientTape() as tape:
        expected = tf.cast(keras_model(x / np.float32(255), training=True), tf.float32)
        expected_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, expected)
        scaled_loss = scale * expected_loss
    expected_gradients = tape.gradient(scaled_loss, keras_model.trainable_weights)
    expected_gradients = [tf.convert_to_tensor(g) / scale for g in expected_gradients]

    of_logits, of_gradients = TOLERANCES[policy]
    atol = of_logits * np.abs(expected).max()
    assert logits.dtype == tf.float32 and logits.shape == (6, CLASSES)
    np.testing.assert_allclose(logits, expected, atol=atol, rtol=0)
    evaluated = model.predict_on_batch((weights, ()), x, training=False)
    np.testing.assert_allclose(evaluated, expected, atol=atol, rtol=0)
    np.testing.assert_allclose(loss, expected_loss, atol=atol, rtol=0)
    assert len(gradients) == len(expected_gradients) > 0
    atol = 3e-5 + of_gradients * tf.linalg.global_norm(expected_gradients).numpy()
    for ours, keras in zip(gradients, expected_gradients, strict=True):
        assert ours.dtype == tf.float32
        np.testing.assert_allclose(ours, keras, atol=atol, rtol=0)


def test_the_gradient_is_that_of_finite_differences():
    model = models.functional_model(
        tf.keras.Sequential([L.Flatten(), L.Dense(4, "tanh"), L.Dense(CLASSES)]), input_shape=SHAPE
    )
    weights = [tf.constant(w) for w in model.initial_weights[0]]
    x, y = random_bytes(5), random_labels(5)

    def loss_in_float64(numpy_weights):
        flat = x.reshape(5, -1) / 255.0
        hidden = np.tanh(flat @ numpy_weights[0] + numpy_weights[1])
        return numpy_losses(hidden @ numpy_weights[2] + numpy_weights[3], y).mean()

    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = model.loss(model.predict_on_batch((weights, ()), x), y)
    gradients = tape.gradient(loss, weights)
    numpy_weights = [np.float64(w) for w in model.initial_weights[0]]
    assert float(loss) == pytest.approx(loss_in_float64(numpy_weights), abs=1e-5)
    rng = np.random.default_rng(2)
    for i, gradient in enumerate(gradients):
        direction = rng.normal(size=gradient.shape)
        ends = []
        for sign in (-1, 1):
            moved = list(numpy_weights)
            moved[i] = moved[i] + sign * 1e-5 * direction
            ends.append(loss_in_float64(moved))
        slope = (ends[1] - ends[0]) / 2e-5
        assert np.sum(gradient * direction) == pytest.approx(slope, abs=1e-4)


@pytest.mark.parametrize("declared", [tf.uint8, tf.float32])
def test_bytes_are_scaled_and_floats_are_not(declared):
    model = models.functional_model(dense_model, input_shape=SHAPE, input_dtype=declared)
    spec = model.input_spec
    assert list(spec) == ["x", "y"]
    assert spec["x"] == tf.TensorSpec([None, *SHAPE], declared)
    assert spec["y"] == tf.TensorSpec([None], tf.int32)
    kernel, bias = model.initial_weights[0]
    x = random_bytes(3)
    expected = x.reshape(3, -1) / 255.0 @ np.float64(kernel) + bias
    for pixels in (x, np.float32(x / 255.0)):
        logits = model.predict_on_batch(model.initial_weights, pixels, training=False)
        np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_the_keras_model_stays_as_it_was():
    keras_model = models.build_cnn(SHAPE, CLASSES, width=4)
    x = np.float32(random_bytes(2) / 255)
    before = keras_model(x).numpy()
    model = models.functional_model(keras_model, input_shape=SHAPE)
    np.testing.assert_array_equal(keras_model(x), before)
    assert all(isinstance(w, tf.Variable) for w in keras_model.trainable_weights)
    assert keras_model.layers[1].kernel is keras_model.trainable_weights[0]
    for ours, keras in zip(model.initial_weights[0], keras_model.get_weights(), strict=True):
        assert type(ours) is np.ndarray
        np.testing.assert_array_equal(ours, keras)
    assert model.initial_weights[1] == ()


def test_an_image_is_classified_alone():
    model = models.functional_model(dense_model(L.Conv2D(4, 3), GroupNorm(2)), input_shape=SHAPE)
    x = random_bytes(5)
    for training in (False, True):
        together = model.predict_on_batch(model.initial_weights, x, training=training)
        alone = model.predict_on_batch(model.initial_weights, x[3:4], training=training)
        np.testing.assert_allclose(together[3], alone[0], atol=1e-5)


def test_loss_is_the_mean_over_the_batch():
    model = models.functional_model(dense_model, input_shape=SHAPE)
    logits = np.float32(np.random.default_rng(0).normal(scale=3, size=(7, CLASSES)))
    labels = random_labels(7)
    expected = numpy_losses(logits, labels)
    assert float(model.loss(logits, labels)) == pytest.approx(expected.mean(), abs=1e-5)
    weights = np.arange(7, dtype=np.float32)
    weighted = float(model.loss(logits, labels, sample_weight=weights))
    assert weighted == pytest.approx((expected * weights).sum() / 7, abs=1e-4)
    huge = np.float32([[1e4, -1e4, 0, 0, 0]])
    assert float(model.loss(huge, np.int32([1]))) == pytest.approx(2e4)
    assert float(model.loss(logits[:0], labels[:0])) == 0.0


def metrics_of(model, batches):
    state = model.initialize_metrics_state()
    for logits, labels in batches:
        output = tff.learning.models.BatchOutput(predictions=logits)
        state = model.update_metrics_state(state, labels, output)
    return {name: value.numpy() for name, value in model.finalize_metrics(state).items()}


def test_metrics_are_means_per_image_over_unequal_batches():
    model = models.functional_model(dense_model, input_shape=SHAPE)
    logits = np.float32(np.random.default_rng(0).normal(size=(11, CLASSES)))
    labels = random_labels(11)
    cuts = [(0, 4), (4, 8), (8, 11), (11, 11)]
    found = metrics_of(model, [(logits[a:b], labels[a:b]) for a, b in cuts])
    assert found["num_examples"] == 11
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == labels).mean())
    assert found["loss"] == pytest.approx(numpy_losses(logits, labels).mean(), abs=1e-5)
    assert metrics_of(model, []) == {"accuracy": 0.0, "loss": 0.0, "num_examples": 0}


def test_build_keras_knows_its_models():
    assert set(models.MODELS) == {"cnn", "resnet18", "resnet34", "resnet50"}
    default = models.build_keras("cnn", SHAPE, CLASSES)
    assert default.count_params() == models.build_cnn(SHAPE, CLASSES).count_params()
    narrow = models.build_keras("resnet18", SHAPE, CLASSES, width=4)
    assert narrow.count_params() == models.build_resnet(18, SHAPE, CLASSES, width=4).count_params()
    with pytest.raises(ValueError, match="resnet51.*"):
        models.build_keras("resnet51", SHAPE, CLASSES)


def clients(sizes):
    datasets = []
    for seed, size in enumerate(sizes):
        elements = collections.OrderedDict(x=random_bytes(size, seed), y=random_labels(size, seed))
        datasets.append(tf.data.Dataset.from_tensor_slices(elements).batch(4))
    return datasets


def test_tffs_own_averaging_and_evaluation_run_on_bytes(local_runtime):
    keras_model = dense_model(L.Conv2D(4, 3, activation="relu"), GroupNorm(2))
    model = models.functional_model(keras_model, input_shape=SHAPE)
    rate = 0.05
    process = tff.learning.algorithms.build_weighted_fed_avg(
        model, tff.learning.optimizers.build_sgdm(rate)
    )
    sizes = (7, 4)
    state = process.next(process.initialize(), clients(sizes)).state
    trained = process.get_model_weights(state).trainable

    # The same round by Keras: one pass over each client's batches, weighted by its images.
    moved = []
    for dataset in clients(sizes):
        keras_model.set_weights(model.initial_weights[0])
        for batch in dataset:
            with tf.GradientTape() as tape:
                logits = keras_model(tf.cast(batch["x"], tf.float32) / 255, training=True)
                loss = tf.keras.losses.sparse_categorical_crossentropy(
                    batch["y"], logits, from_logits=True
                )
                loss = tf.reduce_mean(loss)
            for w, g in zip(
                keras_model.trainable_weights,
                tape.gradient(loss, keras_model.trainable_weights),
                strict=True,
            ):
                w.assign_sub(rate * g)
        moved.append(keras_model.get_weights())
    for ours, first, second in zip(trained, *moved, strict=True):
        np.testing.assert_allclose(ours, (7 * first + 4 * second) / 11, atol=1e-5)

    evaluation = tff.learning.algorithms.build_fed_eval(model)
    eval_state = evaluation.set_model_weights(
        evaluation.initialize(), process.get_model_weights(state)
    )
    data = clients((7, 0, 4))
    result = evaluation.next(eval_state, data).metrics["client_work"]["eval"]
    found = result["current_round_metrics"]
    keras_model.set_weights(trained)
    x = np.concatenate([random_bytes(n, seed) for seed, n in ((0, 7), (2, 4))])
    y = np.concatenate([random_labels(n, seed) for seed, n in ((0, 7), (2, 4))])
    logits = keras_model(np.float32(x) / 255).numpy()
    assert found["num_examples"] == 11
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == y).mean())
    assert found["loss"] == pytest.approx(numpy_losses(logits, y).mean(), abs=1e-4)


def test_a_dataset_reduce_with_gradients_runs_in_the_worker_without_variables(local_runtime):
    model = models.functional_model(
        models.build_cnn(SHAPE, CLASSES, width=4), input_shape=SHAPE, input_dtype=tf.float32
    )
    weights_type = tff.types.to_type(tuple((np.float32, w.shape) for w in model.initial_weights[0]))
    batch_type = collections.OrderedDict(
        x=tff.TensorType(np.float32, [None, *SHAPE]), y=tff.TensorType(np.int32, [None])
    )

    @tff.tensorflow.computation(weights_type, tff.SequenceType(batch_type))
    def summed_gradients(weights, dataset):
        weights = tuple(weights)

        def add(total, batch):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                logits = model.predict_on_batch((weights, ()), batch["x"], training=True)
                loss = model.loss(logits, batch["y"])
            gradients = tape.gradient(loss, weights)
            return tuple(t + g for t, g in zip(total, gradients, strict=True))

        result = dataset.reduce(tuple(tf.zeros_like(w) for w in weights), add)
        graph_def = tf.compat.v1.get_default_graph().as_graph_def()
        nodes = [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]
        ops = {node.op for node in nodes}
        assert "Conv2DBackpropFilter" in ops
        assert not [op for op in ops if op.startswith(("VarHandle", "ReadVariable", "Assign"))]
        return result

    elements = collections.OrderedDict(x=np.float32(random_bytes(6) / 255.0), y=random_labels(6))
    dataset = tf.data.Dataset.from_tensor_slices(elements).batch(6)
    found = summed_gradients(tuple(model.initial_weights[0]), dataset)
    weights = [tf.constant(w) for w in model.initial_weights[0]]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = model.loss(model.predict_on_batch((weights, ()), elements["x"]), elements["y"])
    for ours, eager in zip(found, tape.gradient(loss, weights), strict=True):
        np.testing.assert_allclose(ours, eager, atol=1e-5)
