"""Small computations that tests run in several runtimes."""

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

CLIENT_FLOATS = tff.FederatedType(np.float32, tff.CLIENTS)
NUMBERS = tff.SequenceType(np.int64)


@tff.tensorflow.computation(np.float32)
def square(x):
    return x * x


@tff.federated_computation(CLIENT_FLOATS)
def mean_of_squares(values):
    return tff.federated_mean(tff.federated_map(square, values))


@tff.federated_computation(CLIENT_FLOATS)
def sum_of_squares(values):
    return tff.federated_sum(tff.federated_map(square, values))


@tff.tensorflow.computation(np.int64)
def count_slowly(limit):
    return tf.while_loop(lambda i: i < limit, lambda i: [i + 1], [tf.constant(0, tf.int64)])[0]


@tff.tensorflow.computation(NUMBERS)
def add_up(numbers):
    @tf.function
    def loop():  # `Dataset.reduce` has its function optimized anew in each call: 6 ms
        total = tf.constant(0, tf.int64)
        for number in numbers:
            total += number
        return total

    return loop()
