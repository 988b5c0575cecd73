"""SemiFL: labels at the server, which trains in turn with clients that have none.

Enmao Diao, Jie Ding and Vahid Tarokh, "SemiFL: Semi-Supervised Federated Learning for Unlabeled
Clients with Alternate Training", NeurIPS 2022. It uses what FedLabel does without, a labelled set
at the server, so its results are marked with `labels_at` "server". One round:

  1. A client labels all its images once, with the model that it received, on their weak views. A
     label whose probability is at least tau is kept; its image belongs to D_fix. A client whose
     D_fix is empty drops out.
  2. Each step takes a batch (x_fix, y_fix) of D_fix, as many images (x_mix, y_mix) drawn with
     replacement from all images and their labels, kept or not, and one lambda ~ Beta(a, a). The
     loss is, with A strong and w weak augmentation and x = lambda w(x_fix) + (1 - lambda) w(x_mix),
         CE(A(x_fix), y_fix) + lambda CE(x, y_fix) + (1 - lambda) CE(x, y_mix).
  3. The server takes the uniform mean of the clients that did not drop out, with momentum .5.
  4. The server trains on its labelled images, weakly augmented, for E epochs.

Passes: one forward pass for each image of the client to label it, then two forward and two
backward passes for each image of a batch of D_fix; at the server one of each for each image of a
batch.

What differs from the authors' code, and why:
  - E epochs over D_fix are the client's passes over its batches (tau' batches, or "epoch", one
    pass); an image that is read twice is in D_fix twice. D_fix keeps the order of the batches,
    which is random already, and its batches have the size of the client's largest batch.
  - A(x_fix) is the strong augmentation of the weak view that is mixed, not of a weak view of its
    own; the mixed image is rounded to grey levels where the model takes uint8.
  - The clients' optimizer, also the server's in step 4, is the builder's and starts afresh in each
    round. Theirs is SGD with learning rate .03 (cosine schedule), Nesterov momentum .9 and weight
    decay 5e-4. Gradients are clipped to norm 1 there, here if `max_gradient_norm` says so.
  - Batch statistics (their "static batch normalisation") do not exist: models here have none.
  - Images that hold a NaN or an infinity, or of which the received model gives one, are neither
    labelled nor mixed with others.
  - Randomness is stateless: lambda and the numbers of the images to mix depend on seed, round and
    step, so they are the same at all clients, whose images differ.
Labelled images at clients are not read.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable

from tff_fedlabel import _validation, augmentation
from tff_fedlabel._autograph import as_written, given
from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _local_training, _method, _views

# Each step has its own seed for each of these.
_VIEWS, _LAMBDA, _PARTNERS = range(3)


@dataclasses.dataclass(frozen=True)
class SemiFLConfig:
    """SemiFL's own parameters.

    Attributes:
      threshold: tau in [0, 1]; a pseudo-label is kept if its probability is at least that. .95,
        the authors'.
      mixup_alpha: a > 0 of lambda ~ Beta(a, a), by which images are mixed. .75, the authors'.
      mixup_weight: Weight >= 0 of the loss on mixed images; 0 leaves mixing out (the authors' loss
        "fix").
      server_epochs: Passes of the server over its labelled images in a round, E.
      server_batch_size: Labelled images in a batch of the server, the last of a pass has what is
        left. The authors take 250, and 10 where the server has no more than 250 images.
      max_gradient_norm: Norm to which the gradients of a step are clipped, None is no clipping. The
        authors' code has 1, their paper none.
      strong_augment: A, a callable `(images, *, seed) -> images` on float32 images in [0, 1],
        `seed` an int32 [2]; it is applied to the weak view. None for the identity.
      weak_augment: The weak augmentation, called in the same way; None for the identity.
      seed: The seed of all randomness, a 32-bit int.

    Raises:
      ValueError: A field is out of its range or of the wrong type; the message names it.
    """

    threshold: float = 0.95
    mixup_alpha: float = 0.75
    mixup_weight: float = 1.0
    server_epochs: int = 5
    server_batch_size: int = 250
    max_gradient_norm: float | None = None
    strong_augment: Callable[..., tf.Tensor] | None = augmentation.RandAugment(2, 10.0)
    weak_augment: Callable[..., tf.Tensor] | None = augmentation.WeakAugment()
    seed: int = 0

    def __post_init__(self):
        check = _validation
        checked = {
            "threshold": check.check_number("threshold", self.threshold, 0.0, 1.0),
            "mixup_alpha": check.check_number(
                "mixup_alpha", self.mixup_alpha, 0.0, 1e3, open_low=True
            ),
            "mixup_weight": check.check_number("mixup_weight", self.mixup_weight),
            "seed": check.check_seed(self.seed),
        }
        for name in ("server_epochs", "server_batch_size"):
            checked[name] = check.check_int(name, getattr(self, name))
        if self.max_gradient_norm is not None:
            checked["max_gradient_norm"] = check.check_number(
                "max_gradient_norm", self.max_gradient_norm, 0.0, 1e6, open_low=True
            )
        for name, example in (("strong_augment", "RandAugment"), ("weak_augment", "WeakAugment")):
            check.check_callable_or_none(
                name, getattr(self, name), f"tff_fedlabel.augmentation.{example}()"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def client_update(setup: _method.Setup, client: _method.Client) -> _method.ClientOutput:
    """Steps on images that the received model labelled; r_k is their number, 0 if none was kept.

    Labelled images of the client are not read: in this method the labels are at the server, which
    trains on them after each aggregation. The metrics are `unlabeled_loss` (mean over the steps on
    kept images), `kept_fraction` and, with `diagnose`, `pseudo_label_accuracy`; `labeled_loss` is
    the server's.
    """
    rows, batch_size = _all_rows(client.unlabeled)
    labels, mask, usable = _label(setup, client, rows["x"], batch_size)
    kept_rows, usable_rows = tf.where(mask)[:, 0], tf.where(usable)[:, 0]
    student = _local_training.run(
        setup,
        client.hparams,
        _local_training.clipped(
            functools.partial(_client_step, setup, client, rows["x"], labels, usable_rows),
            setup.config.max_gradient_norm,
        ),
        client.weights,
        _batches(kept_rows, batch_size),
    )
    kept = _views.count(mask)
    metrics = collections.OrderedDict(
        unlabeled_loss=student.metrics["unlabeled_loss"],
        kept_fraction=(kept, tf.cast(tf.size(mask), tf.float32)),
    )
    if setup.diagnose:
        hits = tf.equal(labels, tf.reshape(tf.cast(rows["y"], labels.dtype), [-1]))
        metrics["pseudo_label_accuracy"] = (_views.count(mask & hits), kept)
    return _method.ClientOutput(
        delta=tuple(w - w0 for w, w0 in zip(student.weights, client.weights, strict=True)),
        num_examples=student.num_examples,
        model_metrics=setup.model.initialize_metrics_state(),
        metrics=metrics,
    )


@as_written
def _all_rows(batches: tf.data.Dataset):
    """All images of a client's batches as one, and the size of the largest batch, int64 (>= 1)."""
    none = tf.nest.map_structure(
        lambda spec: tf.zeros([0, *spec.shape[1:]], spec.dtype), batches.element_spec
    )

    def add(found, batch):
        rows, largest = found
        size = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]
        rows = tf.nest.map_structure(lambda a, b: tf.concat([a, b], axis=0), rows, batch)
        return rows, tf.maximum(largest, size)

    return batches.reduce((none, tf.constant(1, tf.int64)), add)


def _batches(rows: tf.Tensor, batch_size: tf.Tensor) -> tf.data.Dataset:
    """Row numbers int64 [n] in batches, the last one with what is left."""
    return tf.data.Dataset.from_tensor_slices(rows).batch(batch_size)


def _label(setup, client, images, batch_size):
    """Step 1: the received model's labels of all images, int64 [n].

    And which of them are kept, and which images are usable, bool [n]. All batches have the same
    seed, so an image that occurs twice has the same view and label.
    """
    number = tf.shape(tf.nest.flatten(images)[0], tf.int64)[0]
    seed = _seed(setup, client, -1, _VIEWS)
    labels = tf.zeros(number[tf.newaxis], tf.int64)
    confidence = tf.zeros(number[tf.newaxis], tf.float32)

    def next_labels(labels, confidence, rows):
        shown = _views.rows(images, rows)
        views = _weak(setup, shown, seed)
        logits = setup.model.predict_on_batch(
            (client.weights, client.non_trainable), _to_model(views, images), training=False
        )
        probabilities = tf.nn.softmax(tf.cast(logits, tf.float32))
        where = rows[:, tf.newaxis]
        best = tf.argmax(probabilities, axis=-1)
        highest = tf.reduce_max(probabilities, axis=-1)
        highest = tf.where(_views.usable(shown, probabilities), highest, -1.0)
        return (
            tf.tensor_scatter_nd_update(labels, where, best),
            tf.tensor_scatter_nd_update(confidence, where, highest),
        )

    for rows in iter(_batches(tf.range(number), batch_size)):
        labels, confidence = next_labels(labels, confidence, rows)
    return labels, confidence >= setup.config.threshold, confidence >= 0


@as_written
def _client_step(setup, client, images, labels, usable_rows, weights, rows, step_num):
    """Step 2 for the batch of D_fix with these row numbers."""
    config = setup.config
    size = tf.size(rows)
    y_fix = tf.gather(labels, rows)
    seed = _seed(setup, client, step_num, _VIEWS)
    weak = _weak(setup, _views.rows(images, rows), seed)
    strong = weak
    if config.strong_augment is not None:
        strong = given(config.strong_augment)(weak, seed=seed)
    views = _to_model(strong, images)
    if config.mixup_weight > 0:
        partners = tf.random.stateless_uniform(
            size[tf.newaxis],
            _seed(setup, client, step_num, _PARTNERS),
            maxval=tf.size(usable_rows, tf.int64),
            dtype=tf.int64,
        )
        partners = tf.gather(usable_rows, partners)
        y_mix = tf.gather(labels, partners)
        share = draw_lambda(config.mixup_alpha, _seed(setup, client, step_num, _LAMBDA))
        mixed = tf.nest.map_structure(
            lambda a, b: share * a + (1.0 - share) * b,
            weak,
            _weak(setup, _views.rows(images, partners), seed),
        )
        # Both views go through the network in one pass.
        views = tf.nest.map_structure(
            lambda a, b: tf.concat([a, b], axis=0), views, _to_model(mixed, images)
        )

    def mean_loss(weights):
        logits = setup.model.predict_on_batch((weights, client.non_trainable), views, training=True)
        logits = tf.cast(logits, tf.float32)
        loss = _cross_entropy(y_fix, logits[:size])
        if config.mixup_weight > 0:
            of_fix, of_mix = (_cross_entropy(y, logits[size:]) for y in (y_fix, y_mix))
            loss += config.mixup_weight * (share * of_fix + (1.0 - share) * of_mix)
        return loss

    loss, gradients = _local_training.differentiate(mean_loss, weights)
    number = tf.cast(size, tf.float32)
    metrics = collections.OrderedDict(unlabeled_loss=(loss * number, number))
    return _local_training.Step(gradients, number, metrics)


def draw_lambda(alpha: float, seed: tf.Tensor) -> tf.Tensor:
    """lambda ~ Beta(alpha, alpha), float32 []: of two Gamma(alpha) the share of the first."""
    gammas = tf.random.stateless_gamma([2], seed, alpha)
    return tf.math.divide_no_nan(gammas[0], gammas[0] + gammas[1])


def server_training(setup: _method.Setup, server: _method.Server) -> _method.ServerOutput:
    """Step 4: E passes over the server's images, each in an order of its own by seed and round.

    Its metric is `labeled_loss`.
    """
    config = setup.config
    number = tf.shape(server.data["y"], tf.int64)[0]
    batch_size = tf.minimum(number, config.server_batch_size)

    def one_pass(epoch):
        seed = augmentation.step_seed(config.seed, server.round_num, epoch)
        order = tf.random.experimental.stateless_shuffle(tf.range(number), seed)
        return _batches(order, batch_size)

    batches = tf.data.Dataset.range(config.server_epochs).flat_map(one_pass)
    received = _method.Client(
        server.weights, server.non_trainable, None, None, server.round_num, server.hparams
    )
    labeled_step = _local_training.labeled_step(setup, received)

    @as_written
    def step(weights, rows, step_num):
        images, labels = server.data["x"], server.data["y"]
        weak = _weak(setup, _views.rows(images, rows), _seed(setup, received, step_num, _VIEWS))
        batch = {"x": _to_model(weak, images), "y": tf.gather(labels, rows)}
        return labeled_step(weights, batch, step_num)

    trained = _local_training.run(
        setup,
        server.hparams,
        _local_training.clipped(step, config.max_gradient_norm),
        server.weights,
        batches,
    )
    return _method.ServerOutput(trained.weights, trained.metrics, trained.model_metrics)


def _seed(setup, client, step_num, of_what):
    """The seed of one kind of draw in a step; step -1 is the labelling before the steps."""
    number = (tf.cast(step_num, tf.int64) + 1) * 3 + of_what
    return augmentation.step_seed(setup.config.seed, client.round_num, number)


def _weak(setup, images, seed):
    """The weak views as floats."""
    views = tf.nest.map_structure(augmentation.to_float, images)
    if setup.config.weak_augment is None:
        return views
    return given(setup.config.weak_augment)(views, seed=seed)


def _to_model(views, images):
    """Views in the dtype of the images, which the model takes."""
    return tf.nest.map_structure(
        lambda view, part: augmentation.from_float(view, part.dtype), views, images
    )


def _cross_entropy(labels, logits):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(losses)


METHOD = _method.Method(
    "semifl",
    SemiFLConfig,
    client_update,
    server_training=server_training,
    uniform_mean=True,
    server_momentum=0.5,
    labels_at=("server",),
)
