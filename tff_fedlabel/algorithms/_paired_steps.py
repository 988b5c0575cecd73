"""The local training that UDA and FixMatch share: each step takes a batch of either kind.

A step is one of SGD on

    L_s + lambda_u L_u + mu / 2 ||w - w0||^2,

L_s the mean loss of the step's labelled images, weakly augmented, L_u the mean over its unlabelled
images of mask * d(target, p(strong view)), where mask and target come from a prediction for the
weak view through which no gradient flows. Mask, target and d are the method's. The last term is
FedProx's. A part without images is 0, and the model never sees an empty batch.

For b labelled and u unlabelled images, of which k pass the mask, the model is called three times:
forward on b + u + k images, backward on b + k. (The authors' code goes forward and backward on all
three views of all images; the gradient of an image that does not pass is 0.)
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from tff_fedlabel import _validation, augmentation
from tff_fedlabel._autograph import as_written
from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _local_training, _method, _views


class Rules(NamedTuple):
    """What a method says about its two losses.

    Attributes:
      target: `(config, logits) -> (mask, target)`: of the logits [b, classes] for the weak views,
        which images pass, bool [b], and what their strong views are compared with, [b, ...].
      distance: `(target, logits) -> losses`: d for the logits [k, classes] of the strong views,
        float32 [k].
      keep: `(config, round_num, logits, labels) -> bool [b]`: which labelled images count in L_s;
        None for all.
    """

    target: Callable[[Any, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    distance: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    keep: Callable[[Any, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor] | None = None


def checked(config: Any) -> dict[str, Any]:
    """The fields that the configurations of both methods have, checked.

    Raises:
      ValueError: A field is out of its range or of the wrong type; the message names it.
    """
    for name, example in (
        ("strong_augment", "tff_fedlabel.augmentation.RandAugment()"),
        ("weak_augment", "tff_fedlabel.augmentation.WeakAugment()"),
    ):
        _validation.check_callable_or_none(name, getattr(config, name), example)
    number = _validation.check_number
    return {
        "threshold": number("threshold", config.threshold, 0.0, 1.0),
        "unlabeled_weight": number("unlabeled_weight", config.unlabeled_weight, open_low=True),
        "include_labeled": _validation.check_flag("include_labeled", config.include_labeled),
        "skip_discarded": _validation.check_flag("skip_discarded", config.skip_discarded),
        "seed": _validation.check_seed(config.seed),
    }


def client_update(
    setup: _method.Setup, client: _method.Client, rules: Rules
) -> _method.ClientOutput:
    """One step for each pair of batches; r_k counts each image of each step at most once."""
    trained = _local_training.run(
        setup,
        client.hparams,
        functools.partial(_step, setup, client, rules),
        client.weights,
        _local_training.pairs(client.labeled, client.unlabeled),
    )
    return _method.ClientOutput(
        delta=tuple(w - w0 for w, w0 in zip(trained.weights, client.weights, strict=True)),
        num_examples=trained.num_examples,
        model_metrics=trained.model_metrics,
        metrics=trained.metrics,
    )


@as_written
def _step(setup, client, rules, weights, batch, step_num):
    config, labeled, unlabeled = setup.config, batch["labeled"], batch["unlabeled"]
    seed = augmentation.step_seed(config.seed, client.round_num, step_num)
    # An image that is in both parts has two weak views. They are independent, and so are views by
    # one function that is given as both augmentations: each kind of view has a seed of its own.
    seeds = [tf.bitwise.bitwise_xor(seed, tf.constant(bits)) for bits in ([0, 0], [0, -1], [-1, 0])]
    keep = rules.keep and functools.partial(rules.keep, config, client.round_num)
    images = unlabeled["x"]
    if config.include_labeled:
        images = tf.nest.map_structure(
            lambda one, other: tf.concat([one, other], axis=0), labeled["x"], images
        )

    def on_labeled():
        views = _views.augmented(config.weak_augment, labeled["x"], seeds[2])
        step = _local_training.labeled_step(setup, client, keep=keep)
        done = step(weights, collections.OrderedDict(labeled, x=views), step_num)
        return done.gradients, done.logits, done.loss, done.metrics

    def on_unlabeled():
        return _unlabeled_loss(setup, client, rules, weights, images, *seeds[:2])

    labeled_gradients, logits, labeled_loss, metrics = _if_any(labeled["x"], on_labeled)
    unlabeled_gradients, loss, mask, labels = _if_any(images, on_unlabeled)
    gradients = tuple(
        g + tf.cast(config.unlabeled_weight, g.dtype) * u
        for g, u in zip(labeled_gradients, unlabeled_gradients, strict=True)
    )
    strength = getattr(config, "proximal_strength", 0.0)
    gradients = _local_training.with_proximal_term(gradients, strength, weights, client.weights)

    # Which labelled images took part, in either loss, and which unlabelled ones.
    num_labeled = _views.batch_size(labeled["x"])
    used = tf.fill([num_labeled], True) if keep is None else keep(logits, labeled["y"])
    if config.include_labeled:
        used |= mask[:num_labeled]
        mask, labels = mask[num_labeled:], labels[num_labeled:]
    number = tf.cast(_views.batch_size(images), tf.float32)
    kept, num_unlabeled = _views.count(mask), tf.cast(tf.size(mask), tf.float32)
    metrics = collections.OrderedDict(
        metrics, unlabeled_loss=(loss * number, number), kept_fraction=(kept, num_unlabeled)
    )
    if setup.diagnose:
        hidden = tf.reshape(tf.cast(unlabeled["y"], labels.dtype), [-1])
        metrics["pseudo_label_accuracy"] = (_views.count(mask & tf.equal(labels, hidden)), kept)
    return _local_training.Step(
        gradients,
        _views.count(used) + kept,
        metrics,
        logits,
        labeled["y"],
        labeled_loss,
        any_labeled=num_labeled > 0,
    )


def _unlabeled_loss(setup, client, rules, weights, images, strong_seed, weak_seed):
    """L_u: its gradients, its value, which images passed, and their classes by the weak view."""
    config = setup.config
    weak = _views.augmented(config.weak_augment, images, weak_seed)
    weak_logits = _views.logits(setup, client, weights, weak, training=False)
    mask, target = rules.target(config, weak_logits)
    usable = _views.usable(images, weak_logits)
    mask &= usable
    if not config.skip_discarded:
        images = _views.zero_unless(usable, images)
        target = _views.zero_unless(mask, target)

    def image_losses(weights, rows):
        strong = _views.augmented(config.strong_augment, _views.rows(images, rows), strong_seed)
        strong_logits = _views.logits(setup, client, weights, strong, training=True)
        return rules.distance(tf.gather(target, rows), strong_logits)

    loss, gradients = _local_training.mean_over_kept(
        image_losses, mask, weights, config.skip_discarded
    )
    return gradients, loss, mask, tf.argmax(weak_logits, axis=-1)


def _if_any(images, function):
    """`function()`, or zeros in its structure where there are no images."""
    traced = tf.function(function, autograph=False).get_concrete_function()

    def zeros():
        return tf.nest.map_structure(
            lambda value: tf.zeros([size or 0 for size in value.shape], value.dtype),
            traced.structured_outputs,
        )

    return tf.cond(_views.batch_size(images) > 0, lambda: traced(), zeros)
