"""How clients read their batches."""

import tensorflow as tf


def options() -> tf.data.Options:
    """Options for a client's few batches: the thread that works on them reads them.

    TensorFlow's default is a pipeline that is rewritten and tuned while it runs. For a client that
    costs more than it brings, and rounds can stall in it: to end an iterator waits for the thread
    that tunes it, which sleeps for many seconds at a time.
    """
    result = tf.data.Options()
    result.autotune.enabled = False
    result.experimental_optimization.apply_default_optimizations = False
    result.threading.private_threadpool_size = 1
    return result
