"""A step of a converted model is Keras' own, whatever its gradients are made of."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from small_models import CLASSES, SHAPE, batch, classifier, sequential

from tff_fedlabel import models

L = tf.keras.layers
RATE = 0.5


def gradients_of(model, x, y):
    """(trainable weights, their gradients, the gradient of the images)."""
    weights = [tf.constant(w) for w in model.initial_weights[0]]
    x = tf.constant(x, tf.float32) / 255
    with tf.GradientTape() as tape:
        tape.watch((weights, x))
        logits = model.predict_on_batch((weights, model.initial_weights[1]), x, training=True)
        loss = model.loss(logits, y)
    return weights, *tape.gradient(loss, (weights, x))


class Positions(L.Layer):
    """The position embedding of a vision transformer."""

    def build(self, input_shape):
        self.embedding = L.Embedding(*input_shape[1:])

    def call(self, x):
        return x + self.embedding(tf.range(x.shape[1]))


class Tokens(L.Layer):
    """Grey levels as words: tied embeddings, looked up first and then an output matrix."""

    def build(self, input_shape):
        self.embedding = L.Embedding(10, 6)
        self.attention = L.Attention(use_scale=True)
        self.heads = L.MultiHeadAttention(2, 3)

    def call(self, x):
        words = self.embedding(tf.cast(tf.reshape(x, [-1, 64]) * 9, tf.int32))
        words = words + self.attention([words, words]) + self.heads(words, words)
        matrix = tf.cast(self.embedding.embeddings, words.dtype)
        return tf.einsum("bne,we->bw", words, matrix)


class Gathered(L.Layer):
    """Rows of one weight by three operations whose gradients are sparse."""

    def build(self, input_shape):
        self.table = self.add_weight("table", [10, CLASSES])
        self.unused_rows = self.add_weight("unused_rows", [4, CLASSES], initializer="ones")

    def call(self, x):
        index = tf.cast(x[:, 0] * 9, tf.int32)
        rows = tf.gather(self.table, index) + tf.nn.embedding_lookup(self.table, 9 - index)
        return rows * tf.gather(self.unused_rows, tf.minimum(index, 1)) + x @ self.table[:1][:, :1]


BUILDERS = {
    "position embedding": lambda: sequential(
        L.Reshape((8, 8)), Positions(), L.Dense(8, "relu"), *classifier()
    ),
    "tied embeddings and attention": lambda: sequential(Tokens(), L.Dense(CLASSES)),
    "gathers": lambda: sequential(L.Flatten(), L.Dense(1, "sigmoid"), Gathered()),
    "gru": lambda: sequential(
        L.Reshape((8, 8)), L.Bidirectional(L.GRU(4, return_sequences=True)), *classifier()
    ),
    "embedding and lstm": lambda: sequential(
        L.Lambda(lambda x: tf.cast(x[:, :, 0, 0] * 9, tf.int32)),
        L.Embedding(10, 3),
        L.LSTM(4),
        L.Dense(CLASSES),
    ),
    "contrast": lambda: sequential(
        L.Lambda(lambda x: tf.image.adjust_contrast(x, 1.5), dtype="float32"),
        L.Conv2D(3, 3),
        *classifier(),
    ),
}


# Of a step. A bias of the attention is the sum of 384 gradients, by Keras too in 16 bits.
TOLERANCES = {"float32": 1e-5, "mixed_float16": 2.0**-7}


# Of the recurrent ones, which take long to trace, one is enough in 16 bits.
CASES = [(n, p) for n in BUILDERS for p in TOLERANCES if (n, p) != ("gru", "mixed_float16")]


@pytest.mark.parametrize("name,policy", CASES, indirect=["policy"])
def test_a_step_is_that_of_keras_fit(name, policy):
    keras_model = BUILDERS[name]()
    model = models.functional_model(keras_model, input_shape=SHAPE)
    x, y = batch()
    weights, gradients, of_images = gradients_of(model, x, y)
    assert of_images is None
    for weight, gradient in zip(weights, gradients, strict=True):
        assert isinstance(gradient, tf.Tensor)
        assert gradient.dtype == weight.dtype and gradient.shape == weight.shape
    stepped = [w - RATE * g for w, g in zip(weights, gradients, strict=True)]

    # Keras' own scale, 2^15 in 16 bits, overflows for one draw of the weights in a hundred; Keras
    # then leaves out the step.
    keras_model.compile(
        tf.keras.mixed_precision.LossScaleOptimizer(
            tf.keras.optimizers.SGD(RATE), dynamic=False, initial_scale=2**8
        ),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=True,  # one step is not worth a graph
    )
    keras_model.fit(np.float32(x) / 255, y, batch_size=len(x), shuffle=False, verbose=0)
    moved = 0.0
    for ours, before, keras in zip(stepped, weights, keras_model.trainable_weights, strict=True):
        np.testing.assert_allclose(ours, keras, atol=TOLERANCES[policy], rtol=0)
        moved = max(moved, np.abs(keras - before).max())
    assert moved > 4 * TOLERANCES[policy]


def test_tff_averages_models_with_embeddings(local_runtime):
    model = models.functional_model(BUILDERS["embedding and lstm"](), input_shape=SHAPE)
    process = tff.learning.algorithms.build_weighted_fed_avg(
        model, tff.learning.optimizers.build_sgdm(RATE)
    )
    x, y = batch()
    data = tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y)).batch(len(x))
    state = process.next(process.initialize(), [data]).state
    weights, gradients, _ = gradients_of(model, x, y)
    trained = process.get_model_weights(state).trainable
    for ours, weight, gradient in zip(trained, weights, gradients, strict=True):
        np.testing.assert_allclose(ours, weight - RATE * gradient, atol=1e-5)
        assert np.abs(ours - weight).max() > 1e-4
