"""A model of one layer, for tests of what happens around it: half as much to trace and to save."""

import tensorflow as tf

NAME = "linear"


def build(input_shape, num_classes, width=1, seed=0):
    """As the models of `models.MODELS` are built; it has no width."""
    init = tf.keras.initializers.GlorotUniform(seed)
    layers = [tf.keras.layers.Input(input_shape), tf.keras.layers.Flatten()]
    return tf.keras.Sequential(
        [*layers, tf.keras.layers.Dense(num_classes, kernel_initializer=init)]
    )
