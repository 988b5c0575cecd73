"""What a single image that is not finite does to a client's update, in every method.

Of labelled images it spoils the update, which is then left out; of unlabelled ones it is left out
alone, whether the image itself is not finite or only what the model says of it.
"""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client
from numpy_reference import SHAPE
from weights import assert_weights_close

from tff_fedlabel import algorithms
from tff_fedlabel.algorithms import _local_training, _views

# Of an image whose first pixel is this the model gives no number.
UNANSWERED = 7.0
# Parameters with which unlabelled images count in round 1 (from 0), FedTriNet's of the state below.
PARAMETERS = {
    "fedmatch": {"lambda_s": 1.0, "lambda_l2": 0.1, "lambda_a": 1.0, "h_interval": 1},
    "fedtrinet": {"warmup_rounds": 0, "ramp_start": 0, "ramp_end": 0, "threshold_scale": 1.6},
    "rscfed": {"unlabeled_weight": 2.0},
}
# Whether the loss is a mean over the whole batch, in which an image that is left out is a 0.
OVER_ALL = {"fedlabel", "fedavg_uda", "fedprox_uda", "fedavg_fixmatch", "fedprox_fixmatch"}


def model():
    linear = build_model(initial_weights())

    @tf.function
    def predict(weights, x, training=True):
        known = tf.where(tf.equal(x[:, 0, 0, 0], UNANSWERED), np.nan, 1.0)
        return known[:, tf.newaxis] * linear.predict_on_batch(weights, x, training=training)

    return tff.learning.models.FunctionalModel(
        initial_weights=linear.initial_weights,
        predict_on_batch_fn=predict,
        loss_fn=linear.loss,
        input_spec=linear.input_spec,
    )


def client_update(method):
    """`(labelled x, y, unlabelled x) -> (update, r_k)`: the work of a client, traced once."""
    wanted = {"strong_augment": None, "weak_augment": None, "threshold": 0.5}
    known = {k: v for k, v in wanted.items() if k in method.config_class.__dataclass_fields__}
    config = method.config_class(**known, **PARAMETERS.get(method.name, {}))
    optimizer = tff.learning.optimizers.build_sgdm(0.1)
    loop = tff.learning.LoopImplementation.DATASET_ITERATOR
    setup = algorithms.Setup(model(), optimizer, config, loop)
    weights = setup.model.initial_weights[0]
    more = {}
    if method.server_state is not None:
        more["server_state"] = method.server_state(setup)
    if method.name == "fedtrinet":
        more["server_state"] = {"max_probability": tf.constant(6.0), "images": tf.constant(10.0)}
    if method.initial_memory is not None:
        more["memory"] = method.initial_memory(setup)
    if method.name == "fedmatch":
        psi = tuple(np.float32(0.3) * w[::-1] for w in weights)
        last = {**more["memory"]["last"], "round_num": np.int32(0), "psi": psi}
        memory = collections.OrderedDict(more["memory"], last=collections.OrderedDict(last))
        more["helpers"] = tf.data.Dataset.from_tensors(memory)

    def batches(**parts):
        return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(parts)).batch(4)

    images = tf.TensorSpec([None, *SHAPE], tf.float32)

    @tf.function(input_signature=[images, tf.TensorSpec([None], tf.int32), images])
    def update(x, y, unlabeled):
        received = tuple(map(tf.constant, weights))
        client = algorithms.Client(
            weights=received,
            non_trainable=(),
            labeled=batches(x=x, y=y),
            unlabeled=batches(x=unlabeled),
            round_num=tf.constant(1),
            hparams=optimizer.get_hparams(optimizer.initialize(received)),
            **more,
        )
        output = method.client_update(setup, client)
        return output.delta, output.num_examples

    return update


def is_finite(delta):
    return all(np.isfinite(d).all() for d in delta)


@pytest.mark.parametrize("name", algorithms.METHODS)
def test_one_image_that_is_not_finite(name):
    method = algorithms.METHODS[name]
    update = client_update(method)
    labeled, unlabeled = random_client(2, 8, 15)
    x, y = (np.concatenate(part) for part in zip(*labeled, strict=True))
    good = np.concatenate(unlabeled)

    bad = good.copy()
    bad[-2, 1, 0] = np.nan
    bad[-1, 0, 0] = UNANSWERED
    # The same without the two, or with black ones: of those the model is not sure.
    without = good[:-2].copy()
    if name in OVER_ALL:
        without = np.concatenate([without, np.zeros((2, *SHAPE), np.float32)])
    expected, used = update(x, y, without)
    found, count = update(x, y, bad)
    assert is_finite(found)
    assert_weights_close(found, expected)
    assert count == used > 0
    # Unlabelled images count.
    if method.reads_unlabeled:
        alone, _ = update(x, y, good[:0])
        assert max(np.abs(a - b).max() for a, b in zip(alone, found, strict=True)) > 1e-3
    # Nor does a batch of nothing else do harm.
    assert is_finite(update(x, y, bad[-2:])[0])

    for spoiled in (
        np.where(np.arange(8)[:, None, None, None] == 3, np.nan, x),
        0 * x + UNANSWERED,
    ):
        found, _ = update(np.float32(spoiled), y, good)
        # SemiFL reads no labels at clients.
        assert is_finite(found) == (method.labels_at == ("server",))


def test_rows_that_turn_out_unusable_are_left_out():
    """With an embedding, the shape of whose gradient TensorFlow does not know by itself."""
    factors, tokens = np.float32([1, 2, np.nan, 4, 5]), np.array([0, 1, 2, 3, 1, 2])

    @tf.function
    def run(table, rows):
        def compute(rows):
            ids = tf.gather(tokens, rows)

            def loss_and_outputs(weights):
                outputs = tf.reduce_sum(tf.gather(weights[0], ids), axis=1) * tf.gather(
                    factors, ids
                )
                return tf.reduce_mean(outputs), outputs

            (loss, outputs), gradients = _local_training.differentiate(loss_and_outputs, (table,))
            return tf.math.is_finite(outputs), (gradients, loss, tf.size(rows))

        return _views.of_usable_rows(compute, rows)

    table = np.arange(15, dtype=np.float32).reshape(5, 3)
    (gradient,), loss, number = run(table, np.arange(6))
    kept = [0, 1, 3, 1]
    assert number == 4
    losses = [factors[t] * table[t].sum() for t in kept]
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-6)
    expected = np.zeros_like(table)
    for token in kept:
        expected[token] += factors[token] / 4
    np.testing.assert_allclose(gradient, expected)
    for rows in ([2, 5], []):
        (gradient,), loss, number = run(table, np.array(rows, np.int64))
        assert not np.any(gradient) and float(loss) == int(number) == 0
