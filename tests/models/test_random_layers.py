"""Random layers: Keras' own draw from the images and weights, others are warned of."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tff_fedlabel import models

L = tf.keras.layers
SHAPE = (8, 8, 1)
CLASSES = 5


def dense_model(*layers_before):
    return tf.keras.Sequential([L.InputLayer(SHAPE), *layers_before, L.Flatten(), L.Dense(CLASSES)])


def random_bytes(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *SHAPE)).astype(np.uint8)


def test_dropout_repeats_itself_and_changes_with_images_weights_and_layer():
    rate, wide = 0.5, 4096
    keras_model = tf.keras.Sequential(
        [
            L.Flatten(),
            L.Lambda(lambda x: tf.ones([tf.shape(x)[0], wide])),
            L.Dropout(rate),
            L.Dropout(rate),
            L.Dense(2, kernel_initializer="ones"),
        ]
    )
    model = models.functional_model(keras_model, input_shape=SHAPE)
    weights = model.initial_weights

    def first_logits(x, weights=weights, training=True):
        return model.predict_on_batch(weights, x, training=training).numpy()[:, 0]

    x = random_bytes(8)
    drawn = first_logits(x)
    np.testing.assert_array_equal(first_logits(x), drawn)
    np.testing.assert_allclose(first_logits(x, training=False), wide)
    assert len(set(drawn)) > 4  # Each image has a mask of its own.
    # Two independent masks keep a quarter of the units, each scaled by 4: the sum's mean is `wide`
    # and its deviation sqrt(3 * wide). One mask used twice would keep half and give 2 * wide.
    assert np.abs(drawn - wide).max() < 5 * np.sqrt(3 * wide)
    assert not np.array_equal(first_logits(random_bytes(8, seed=1)), drawn)
    moved = ((weights[0][0], weights[0][1] + np.float32(1e-3)), ())
    assert not np.allclose(first_logits(x, moved), drawn, atol=0.1)


KERAS_LAYERS = {
    "dropouts": lambda: [L.Dropout(0.3), L.SpatialDropout2D(0.3), L.AlphaDropout(0.3)],
    "noise": lambda: [L.GaussianNoise(0.1), L.GaussianDropout(0.3)],
    "geometry": lambda: [L.RandomFlip(), L.RandomRotation(0.1), L.RandomZoom(0.1)],
    "more geometry": lambda: [L.RandomTranslation(0.1, 0.1), L.RandomCrop(8, 8)],
    "levels": lambda: [L.RandomContrast(0.5), L.RandomBrightness(0.2, value_range=(0, 1))],
    "recurrent": lambda: [L.Reshape((8, 8)), L.LSTM(4, dropout=0.2, recurrent_dropout=0.2)],
    "stacked": lambda: [L.Reshape((8, 8)), L.RNN([L.GRUCell(4, dropout=0.2), L.GRUCell(4)])],
    "attention": lambda: [L.Reshape((8, 8)), SelfAttention()],
}


class SelfAttention(L.Layer):
    def build(self, input_shape):
        self.attention = L.MultiHeadAttention(2, 4, dropout=0.3)

    def call(self, x):
        return self.attention(x, x)


def warnings_of(category, caught):
    """Those alone: after `set_random_seed` Keras 2.14 itself warns with a DeprecationWarning."""
    return [warning for warning in caught if warning.category is category]


@pytest.mark.parametrize("name", KERAS_LAYERS)
def test_keras_layers_repeat_themselves_without_a_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = models.functional_model(dense_model(*KERAS_LAYERS[name]()), input_shape=SHAPE)
    x = random_bytes(4)
    once, again = (model.predict_on_batch(model.initial_weights, x).numpy() for _ in range(2))
    np.testing.assert_array_equal(once, again)
    calm = model.predict_on_batch(model.initial_weights, x, training=False)
    assert np.abs(calm - once).max() > 1e-5  # There was something to draw.


def test_contrast_is_drawn_within_its_factor():
    """Against NumPy: x is moved away from its mean by one factor for a batch."""
    model = models.functional_model(
        tf.keras.Sequential(
            [L.InputLayer(SHAPE), L.RandomContrast(0.4), L.Flatten(), L.Dense(64, use_bias=False)]
        ),
        input_shape=SHAPE,
    )
    weights = ([np.eye(64, dtype=np.float32)], ())
    factors = []
    for seed in range(30):
        x = 0.4 + 0.2 * np.random.default_rng(seed).random((3, *SHAPE), np.float32)
        contrasted = model.predict_on_batch(weights, x).numpy().reshape(x.shape)
        means = x.mean(axis=(1, 2), keepdims=True)
        factor = ((contrasted - means) * (x - means)).sum() / ((x - means) ** 2).sum()
        np.testing.assert_allclose(contrasted, means + factor * (x - means), atol=1e-5)
        factors.append(factor)
    assert 0.6 <= min(factors) < 0.8 and 1.2 < max(factors) <= 1.4


class Noise(L.Layer):
    """Adds noise by whatever function it is given."""

    def __init__(self, noise, **kwargs):
        super().__init__(**kwargs)
        self.noise = noise

    def call(self, x):
        return x + self.noise(x)


def in_a_loop(x):
    def body(step, total):
        return step + 1, total + tf.random.uniform(tf.shape(x))

    return tf.while_loop(lambda step, _: step < 2, body, (0, tf.zeros_like(x)))[1]


def in_a_branch(x):
    return tf.cond(tf.size(x) > 3, lambda: tf.random.normal(tf.shape(x)), lambda: x)


@pytest.mark.parametrize(
    ("noise", "operation"),
    [
        (lambda x: tf.random.normal(tf.shape(x)), "RandomStandardNormal"),
        (lambda x: tf.random.normal(tf.shape(x), seed=3), "RandomStandardNormal"),
        (lambda x: tf.random.shuffle(x), "RandomShuffle"),
        (in_a_loop, "RandomUniform"),
        (in_a_branch, "RandomStandardNormal"),
        (tf.function(lambda x: tf.random.uniform(tf.shape(x))), "RandomUniform"),
    ],
)
def test_stateful_draws_are_warned_of_in_one_line(noise, operation):
    quiet = Noise(lambda x: tf.random.stateless_normal(tf.shape(x), (1, 2)), name="quiet")
    keras_model = dense_model(quiet, L.Dropout(0.1), Noise(noise, name="noisy"))
    with pytest.warns(UserWarning) as caught:
        models.functional_model(keras_model, input_shape=SHAPE)
    (warning,) = warnings_of(UserWarning, caught)
    message = str(warning.message)
    assert f"in 'noisy' ({operation}):" in message
    assert "quiet" not in message and "dropout" not in message
    assert len(message.splitlines()) == 1
    assert warning.filename == __file__


def test_one_warning_names_every_layer():
    first, second = (
        Noise(lambda x: tf.random.normal(tf.shape(x)), name=f"noise_{name}") for name in "ab"
    )
    with pytest.warns(UserWarning) as caught:
        models.functional_model(dense_model(first, second, first), input_shape=SHAPE)
    (warning,) = warnings_of(UserWarning, caught)
    assert "'noise_a' (RandomStandardNormal), 'noise_b' (RandomStandardNormal):" in str(
        warning.message
    )


def test_a_subclassed_models_own_draws_are_warned_of():
    class Noisy(tf.keras.Model):
        def __init__(self):
            super().__init__(name="mine")
            self.dense = L.Dense(CLASSES)

        def call(self, x, training=False):
            x = tf.reshape(x, [-1, 64])
            return self.dense(x + tf.random.normal(tf.shape(x)) if training else x)

    with pytest.warns(UserWarning, match="in 'mine' .RandomStandardNormal"):
        models.functional_model(Noisy(), input_shape=SHAPE)


def test_a_generator_with_a_state_is_refused():
    generator = tf.random.Generator.from_seed(1)
    keras_model = dense_model(Noise(lambda x: generator.normal(tf.shape(x))))
    with pytest.raises(ValueError, match="add_weight"):
        models.functional_model(keras_model, input_shape=SHAPE)
