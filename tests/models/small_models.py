"""Small Keras models and the images that they are tested on."""

import numpy as np
import tensorflow as tf

SHAPE = (8, 8, 1)
CLASSES = 5


def sequential(*layers):
    return tf.keras.Sequential([tf.keras.layers.InputLayer(SHAPE), *layers])


def classifier():
    return [tf.keras.layers.Flatten(), tf.keras.layers.Dense(CLASSES)]


def dense_model(*layers_before):
    return sequential(*layers_before, *classifier())


def batch(n=6):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (n, *SHAPE)).astype(np.uint8)
    return x, rng.integers(0, CLASSES, n).astype(np.int32)
