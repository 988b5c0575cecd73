"""A linear softmax model and client data for whole rounds through TFF."""

import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from numpy_reference import CLASSES, FEATURES, SHAPE


def build_model(weights):
    @tf.function
    def predict(model_weights, x, training=True):
        del training
        kernel, bias = model_weights[0]
        return tf.reshape(x, [-1, FEATURES]) @ kernel + bias

    def loss(output, label, sample_weight=None):
        del sample_weight
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=output)
        )

    return tff.learning.models.FunctionalModel(
        initial_weights=(tuple(np.float32(w) for w in weights), ()),
        predict_on_batch_fn=predict,
        loss_fn=loss,
        input_spec=collections.OrderedDict(
            x=tf.TensorSpec([None, *SHAPE], tf.float32), y=tf.TensorSpec([None], tf.int32)
        ),
    )


def initial_weights(seed=0, scale=1.5):
    rng = np.random.default_rng(seed)
    return [scale * rng.normal(size=(FEATURES, CLASSES)), 0.1 * rng.normal(size=CLASSES)]


def random_images(rng, n):
    return rng.uniform(size=(n, *SHAPE)).astype(np.float32)


def random_client(seed, labeled=11, unlabeled=14):
    """(labelled batches, unlabelled batches) of 4, the last one partial."""
    rng = np.random.default_rng(seed)
    x, y = random_images(rng, labeled), rng.integers(CLASSES, size=labeled).astype(np.int32)
    u = random_images(rng, unlabeled)
    return (
        [(x[i : i + 4], y[i : i + 4]) for i in range(0, labeled, 4)],
        [u[i : i + 4] for i in range(0, unlabeled, 4)],
    )


def to_tff(client, hidden=None):
    """The client data that `process.next` takes, for one `random_client`."""
    labeled, unlabeled = client
    x = np.concatenate([x for x, _ in labeled] or [np.zeros((0, *SHAPE), np.float32)])
    y = np.concatenate([y for _, y in labeled] or [np.zeros(0, np.int32)])
    u = np.concatenate(unlabeled or [np.zeros((0, *SHAPE), np.float32)])
    rows = collections.OrderedDict(x=u)
    if hidden is not None:
        rows["y"] = np.asarray(hidden(len(u)), np.int32)
    return collections.OrderedDict(
        labeled=tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y)).batch(4),
        unlabeled=tf.data.Dataset.from_tensor_slices(rows).batch(4),
    )
