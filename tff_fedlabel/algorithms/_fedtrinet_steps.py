"""The steps of FedTriNet on single batches: measuring the global model, and voting and training."""

from __future__ import annotations

import collections

from tff_fedlabel._autograph import as_written
from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _local_training, _views


@as_written
def measuring_step(setup, client, weights, batch, step_num):
    """The max-probability of w on a batch; the gradients are 0 and the weights are not used."""
    del step_num
    probabilities = _probabilities(setup, client, client.weights, batch["x"])
    metrics = collections.OrderedDict(max_probability=_sum_of_finite(probabilities))
    return _local_training.Step(tuple(tf.zeros_like(w) for w in weights), tf.zeros([]), metrics)


@as_written
def training_step(setup, client, plan, players, weights, batch, step_num):
    """One step on a labelled and an unlabelled batch, either of which may have no image."""
    labeled = _labeled_part(setup, client, weights, batch["labeled"], step_num)
    images = batch["unlabeled"]["x"]
    number = _views.batch_size(images)

    def vote():
        all_three = [_probabilities(setup, client, player, images) for player in players]
        q = tf.add_n(all_three)
        mask = (tf.reduce_max(q, axis=-1) >= plan.threshold) & _views.usable(images, q)
        return tf.argmax(q, axis=-1), mask, _sum_of_finite(all_three[1])

    def nobody_votes():
        zero = tf.zeros([])
        return tf.zeros([0], tf.int64), tf.zeros([0], tf.bool), (zero, zero)

    labels, mask, max_probability = tf.cond(number > 0, vote, nobody_votes)
    kept_rows = tf.where(mask)[:, 0]
    kept = tf.cast(tf.size(kept_rows), tf.float32)

    def loss(weights):
        rows = _views.rows(images, kept_rows)
        logits = _views.logits(setup, client, weights, rows, training=True)
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, kept_rows), logits)
        )

    pseudo_loss, pseudo_gradients = tf.cond(
        kept > 0,
        lambda: _local_training.differentiate(loss, weights),
        lambda: (tf.zeros([]), tuple(tf.zeros_like(w) for w in weights)),
    )
    metrics = collections.OrderedDict(
        labeled.metrics,
        unlabeled_loss=(pseudo_loss * kept, kept),
        kept_fraction=(kept, tf.cast(number, tf.float32)),
        max_probability=max_probability,
    )
    if setup.diagnose:
        hidden = tf.reshape(tf.cast(batch["unlabeled"]["y"], labels.dtype), [-1])
        hits = tf.cast(mask & tf.equal(labels, hidden), tf.float32)
        metrics["pseudo_label_accuracy"] = (tf.reduce_sum(hits), kept)
    gradients = tuple(
        g + tf.cast(plan.alpha, g.dtype) * p
        for g, p in zip(labeled.gradients, pseudo_gradients, strict=True)
    )
    return labeled._replace(
        gradients=gradients, num_examples=labeled.num_examples + kept, metrics=metrics
    )


def _labeled_part(setup, client, weights, batch, step_num):
    """The step on the labelled images alone; zeros where there is none."""
    step = _local_training.labeled_step(setup, client)
    leaves = tf.nest.flatten(batch["x"])

    def without_images():
        # One black image tells the shape of the logits: a network may fail on a batch of none.
        one = tf.nest.map_structure(lambda part: tf.zeros([1, *part.shape[1:]], part.dtype), batch)
        empty = step(weights, one, step_num)
        zeros = tf.nest.map_structure(
            tf.zeros_like, (empty.gradients, empty.num_examples, empty.metrics, empty.loss)
        )
        return _local_training.Step(*zeros[:3], empty.logits[:0], batch["y"], zeros[3])

    return tf.cond(
        tf.shape(leaves[0])[0] > 0, lambda: step(weights, batch, step_num), without_images
    )


def _probabilities(setup, client, weights, images):
    return tf.nn.softmax(_views.logits(setup, client, weights, images, training=False))


def _sum_of_finite(probabilities):
    """(sum of the largest probabilities, number) of the images of which they are numbers."""
    largest = tf.reduce_max(probabilities, axis=-1)
    finite = tf.math.is_finite(largest)
    largest = tf.where(finite, largest, tf.zeros_like(largest))
    return tf.reduce_sum(largest), tf.reduce_sum(tf.cast(finite, tf.float32))
