"""RSCFed: the consensus of random groups of clients, some of which have labels and others none.

Xiaoxiao Liang, Yiqun Lin, Huazhu Fu, Lei Zhu and Xiaomeng Li, "RSCFed: Random Sampling Consensus
Federated Semi-supervised Learning", CVPR 2022. One round:

  1. A client with labels takes steps on their cross-entropy. A client without labels is a student
     of its own mean teacher: with two weak views x1, x2 of a batch, teacher theta' and
     sharpen(p)_c = p_c^(1/T) / sum_c' p_c'^(1/T), each step lowers
         lambda_u mean_i || p_student(x2_i) - sharpen(p_theta'(x1_i)) ||^2,
     after which theta' = a theta' + (1 - a) theta, a = min(1 - 1 / (t + 1), .999), t the number of
     the client's steps before. The teacher starts as the first model that the client receives and
     then stays at the client: it is the client's memory.
  2. The server draws M random groups of K of the clients. In a group with plain mean theta_avg
     (weights n_k / sum n) client k has a weight proportional to
         n_k / sum n * exp(-beta || theta_k - theta_avg || / n_k),
     beta = 1e4, or 100 in a group with a labelled client. The new model is the mean of the M
     weighted means.

Passes: a labelled step has one forward and one backward pass, an unlabelled one two forward and one
backward. Every client keeps one more model.

What differs from the authors' code, and why:
  - There, a client that is drawn for two groups trains twice in a round, and groups are drawn from
    all clients. Here the cohort of a round trains once, and groups are drawn from those of it that
    used an image; with fewer than K there is one group, of them all.
  - n_k is the number of images that the client used in the round (r_k), which is the size of its
    data with steps of "epoch".
  - A client with labelled and with unlabelled images (`labels_at` "every_client") is not foreseen
    there. Here it takes its labelled steps first and then, from there and with fresh optimizer
    state, its unlabelled ones; r_k counts both, and it is a labelled client for beta.
  - Their code sums the norms of the single weight tensors (`distance` "by_tensor"), multiplies the
    weight of labelled clients by 6 in the published command (`labeled_factor`), clips gradients to
    norm 5 (`max_gradient_norm`), keeps optimizer state from round to round, and starts from a model
    that was trained on the labelled client (`--init_from` of the trainer). The paper has none of
    these; the first three are options.
  - Their learning rates are .03 at labelled and .021 at unlabelled clients, with momentum .9,
    weight decay 5e-4, batches of 64 and one epoch. Here the optimizer is the builder's, and
    `unlabeled_lr_factor` multiplies the unlabelled gradient, which for SGD is the same.
  - Unlabelled images that hold a NaN or an infinity, or of which teacher or student gives one, are
    left out; the mean is over the others, and r_k does not count them.
  - Randomness is stateless, from seed, round and step.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable

from tff_fedlabel import _validation, augmentation
from tff_fedlabel._autograph import as_written
from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _local_training, _method, _views

DISTANCES = ("whole", "by_tensor")


@dataclasses.dataclass(frozen=True)
class RSCFedConfig:
    """RSCFed's own parameters, with the symbols of the paper.

    Attributes:
      num_groups: M, random groups of clients in a round (the paper's sub-consensus models). 3, the
        authors'.
      group_size: K, clients in a group; where no more take part in a round, each group is all of
        them, and nothing is left of the random choice. 5, the authors'.
      distance_scale: beta >= 0 in a group without a labelled client. 1e4, the authors'.
      labeled_distance_scale: beta >= 0 in a group with a labelled client. 100, the authors'.
      labeled_factor: Multiplies the weight of labelled clients in a group; above 0. The paper has
        1, the authors' published command 6.
      distance: How far two models are apart: whole (the norm of the difference of all weights) or
        by_tensor (the sum of the norms of the single tensors, the authors' code).
      unlabeled_weight: lambda_u >= 0, the weight of the unlabelled loss. .02, the authors'.
      sharpening_temperature: T of the teacher's sharpened predictions, 1e-6 to 1e6.
      ema_decay: The largest a in [0, 1] of the teacher's moving average.
      unlabeled_lr_factor: Learning rate of unlabelled steps as a share of that of labelled ones.
      max_gradient_norm: Norm to which the gradients of a step are clipped, None is no clipping. The
        authors' code has 5.
      weak_augment: The augmentation that makes both views, a callable `(images, *, seed) -> images`
        on float32 images in [0, 1], `seed` an int32 [2]; None for the identity.
      seed: The seed of groups and views, a 32-bit int.

    Raises:
      ValueError: A field is out of its range or of the wrong type; the message names it.
    """

    num_groups: int = 3
    group_size: int = 5
    distance_scale: float = 1e4
    labeled_distance_scale: float = 100.0
    labeled_factor: float = 1.0
    distance: str = "whole"
    unlabeled_weight: float = 0.02
    sharpening_temperature: float = 0.5
    ema_decay: float = 0.999
    unlabeled_lr_factor: float = 0.7
    max_gradient_norm: float | None = None
    weak_augment: Callable[..., tf.Tensor] | None = augmentation.WeakAugment()
    seed: int = 0

    def __post_init__(self):
        check = _validation
        checked = {
            "num_groups": check.check_int("num_groups", self.num_groups, 1, 1001),
            "group_size": check.check_int("group_size", self.group_size),
            "ema_decay": check.check_number("ema_decay", self.ema_decay, 0.0, 1.0),
            "seed": check.check_seed(self.seed),
        }
        for name in ("distance_scale", "labeled_distance_scale", "unlabeled_weight"):
            checked[name] = check.check_number(name, getattr(self, name))
        name = "sharpening_temperature"
        checked[name] = check.check_temperature(name, self.sharpening_temperature)
        positive = ("labeled_factor", "unlabeled_lr_factor")
        for name in (*positive, "max_gradient_norm"):
            if getattr(self, name) is not None or name in positive:
                checked[name] = check.check_number(
                    name, getattr(self, name), 0.0, 1e6, open_low=True
                )
        check.check_name("distance", self.distance, DISTANCES)
        check.check_callable_or_none(
            "weak_augment", self.weak_augment, "tff_fedlabel.augmentation.WeakAugment()"
        )
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def initial_memory(setup: _method.Setup):
    """The teacher of a client that has not taken a step yet, of no use until it has."""
    teacher = tuple(tf.zeros_like(w) for w in setup.model.initial_weights[0])
    return collections.OrderedDict(teacher=teacher, steps=tf.constant(0))


def client_update(setup: _method.Setup, client: _method.Client) -> _method.ClientOutput:
    """Labelled steps, then unlabelled ones with the client's mean teacher; r_k counts both.

    The metrics are `labeled_loss`, `unlabeled_loss` (with lambda_u), `kept_fraction` (1: the method
    keeps every image, unless it is not finite) and, with `diagnose`, `pseudo_label_accuracy`, which
    is the teacher's.
    """
    max_norm = setup.config.max_gradient_norm
    local = _local_training.run(
        setup,
        client.hparams,
        _local_training.clipped(_local_training.labeled_step(setup, client), max_norm),
        client.weights,
        client.labeled,
    )
    begun = client.memory["steps"] > 0
    teacher = tuple(
        tf.where(begun, own, received)
        for own, received in zip(client.memory["teacher"], client.weights, strict=True)
    )
    unlabeled_step = functools.partial(_unlabeled_step, setup, client)
    student = _local_training.run(
        setup,
        client.hparams,
        _scaled(
            _local_training.clipped(unlabeled_step, max_norm), setup.config.unlabeled_lr_factor
        ),
        local.weights,
        client.unlabeled,
        carried=(teacher, client.memory["steps"]),
        after_step=functools.partial(_follow, setup.config.ema_decay),
    )
    num_examples = local.num_examples + student.num_examples
    teacher, steps = student.carried
    return _method.ClientOutput(
        delta=tuple(w - w0 for w, w0 in zip(student.weights, client.weights, strict=True)),
        num_examples=num_examples,
        model_metrics=local.model_metrics,
        metrics=collections.OrderedDict([*local.metrics.items(), *student.metrics.items()]),
        sent=collections.OrderedDict(
            images=num_examples, labeled=tf.cast(local.num_examples > 0, tf.float32)
        ),
        memory=collections.OrderedDict(teacher=teacher, steps=steps),
    )


@as_written
def _unlabeled_step(setup, client, weights, batch, step_num, teaching):
    """The gradient of the unlabelled loss for one batch."""
    config, images = setup.config, batch["x"]
    teacher, _ = teaching

    def on_rows(rows):
        """Which of these rows are usable, and gradients and sums over all of them."""
        shown = _views.rows(images, rows)
        first, second = (
            _views.augmented(
                config.weak_augment,
                shown,
                augmentation.step_seed(config.seed, client.round_num, 2 * step_num + view),
            )
            for view in range(2)
        )
        of_teacher = _views.logits(setup, client, teacher, first, training=False)
        # Sharpened probabilities are those of logits divided by the temperature.
        targets = tf.nn.softmax(of_teacher / config.sharpening_temperature)

        def mean_loss(weights):
            logits = _views.logits(setup, client, weights, second, training=True)
            distances = tf.nn.softmax(logits) - targets
            losses = tf.reduce_sum(distances**2, axis=-1)
            return config.unlabeled_weight * tf.reduce_mean(losses), logits

        (loss, logits), gradients = _local_training.differentiate(mean_loss, weights)
        number = tf.cast(tf.size(rows), tf.float32)
        sums = number, loss * number
        if setup.diagnose:
            guessed = tf.argmax(targets, axis=-1)
            hidden = tf.reshape(tf.cast(tf.gather(batch["y"], rows), guessed.dtype), [-1])
            sums = (*sums, _views.count(tf.equal(guessed, hidden)))
        return _views.usable(shown, of_teacher, logits), (gradients, sums)

    rows = tf.where(_views.usable(images))[:, 0]
    gradients, (number, loss, *hits) = _views.of_usable_rows(on_rows, rows)
    metrics = collections.OrderedDict(
        unlabeled_loss=(loss, number),
        kept_fraction=(number, tf.cast(_views.batch_size(images), tf.float32)),
    )
    if setup.diagnose:
        metrics["pseudo_label_accuracy"] = (*hits, number)
    return _local_training.Step(gradients, number, metrics)


def _scaled(step, factor):
    """`step` with its gradients multiplied by a factor."""

    def scaled_step(*args):
        done = step(*args)
        return done._replace(gradients=tuple(tf.cast(factor, g.dtype) * g for g in done.gradients))

    return scaled_step


def _follow(decay, weights, teaching):
    """The teacher after a step of the student."""
    teacher, steps = teaching
    share = tf.minimum(1.0 - 1.0 / (tf.cast(steps, tf.float32) + 1.0), decay)

    def follow(own, student):
        kept = tf.cast(share, own.dtype)
        return kept * own + (1.0 - kept) * student

    teacher = tuple(follow(own, w) for own, w in zip(teacher, weights, strict=True))
    return teacher, steps + 1


@as_written
def aggregate(setup: _method.Setup, clients: _method.Clients):
    """Step 2: the mean of the consensus of M groups."""
    config = setup.config
    groups = draw_groups(config, clients.weights > 0, clients.round_num)
    zeros = tuple(tf.zeros(d.shape[1:], d.dtype) for d in clients.delta)

    def add(total, group):
        consensus = _consensus(config, clients, group)
        return tuple(t + c for t, c in zip(total, consensus, strict=True))

    # A loop, not M copies of a group, and with one group's consensus in memory at a time.
    total = tf.foldl(add, groups, zeros, parallel_iterations=1)
    return tuple(t / config.num_groups for t in total)


def draw_groups(config: RSCFedConfig, able: tf.Tensor, round_num: tf.Tensor) -> tf.Tensor:
    """Random groups of K different clients, bool [M, n].

    Args:
      config: M, K and the seed.
      able: bool [n], the clients to draw from; if they are K or fewer, each group is all of them.
      round_num: int32 [].
    """
    shape = [config.num_groups, tf.size(able)]
    seed = augmentation.step_seed(config.seed, round_num, 0)
    draws = tf.where(able, tf.random.stateless_uniform(shape, seed), -1.0)
    # The rank of each client in each group, the highest draw first.
    ranks = tf.argsort(tf.argsort(draws, direction="DESCENDING"))
    return able & (ranks < config.group_size)


def _consensus(config, clients, group):
    """The distance-weighted mean of a group's updates."""
    size = tf.where(group, clients.weights, 0.0)
    plain = _weighted_mean(tf.math.divide_no_nan(size, tf.reduce_sum(size)), clients.delta)
    squares = tf.stack(
        [
            tf.reduce_sum(tf.reshape(tf.cast(d - mean, tf.float32), [tf.shape(d)[0], -1]) ** 2, 1)
            for d, mean in zip(clients.delta, plain, strict=True)
        ]
    )
    if config.distance == "whole":
        distances = tf.sqrt(tf.reduce_sum(squares, axis=0))
    else:
        distances = tf.reduce_sum(tf.sqrt(squares), axis=0)
    labeled = clients.sent["labeled"] > 0
    scale = tf.where(
        tf.reduce_any(group & labeled),
        config.labeled_distance_scale,
        config.distance_scale,
    )
    # As logarithms, for exp(-beta ...) may be 0 for all of a group.
    scores = tf.math.log(size) - scale * distances / clients.sent["images"]
    scores += tf.where(labeled, tf.math.log(config.labeled_factor), 0.0)
    share = tf.nn.softmax(tf.where(group, scores, tf.float32.min))
    return _weighted_mean(tf.where(group, share, 0.0), clients.delta)


def _weighted_mean(share, rows):
    return tuple(tf.tensordot(tf.cast(share, row.dtype), row, 1) for row in rows)


METHOD = _method.Method(
    "rscfed",
    RSCFedConfig,
    client_update,
    aggregate=aggregate,
    initial_memory=initial_memory,
    labels_at=("some_clients", "every_client"),
)
