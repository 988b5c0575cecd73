"""FedLabel: each client labels its images with the surer of its local and the global model.

Yae Jee Cho, Gauri Joshi and Dimitrios Dimitriadis, "Local or Global: Selective Knowledge
Assimilation for Federated Learning with Limited Labels", ICCV 2023. Equation labels below are
those of the paper's source. One client in one round (Algorithm 1):

  1. tau SGD steps on labelled batches take the global model w to the local model w_L
     (eq. local_model_update); delta_L = w_L - w (eq. suplocalupdate).
  2. For each unlabelled batch, w and w_L, both frozen, look at the images. The surer one labels
     them (eq. pseul0), and a label is kept if its probability exceeds beta (eq. pseul).
  3. One SGD step moves w_U, which also starts at w, on the cross-entropy of the strongly augmented
     image (eq. ce) plus, where the discarded expert agrees, its weighted divergence from that
     expert (eqs. loc-glob1, loc-glob2), averaged over the whole batch (eq. unsuploss);
     delta_U = w_U - w (eq. unsuplocalupdate).
  4. The client sends delta_L + delta_U and r_k, the images that took part.

The server adds sum_k r_k delta_k / sum_k r_k to w.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import augmentation, pseudo_labels
from tff_fedlabel.algorithms import _client_work, _local_sgd

VIEWS = ("original", "augmented")


@dataclasses.dataclass(frozen=True)
class FedLabelConfig:
    """FedLabel's own parameters, with the symbols of the paper.

    Attributes:
      confidence: h of eq. pseul0: "variance" (the paper's), "entropy" (1 - H / log N), or a
        callable `[batch, classes] -> [batch]`, not negative, higher = surer.
      confidence_input: What h sees: "probabilities" or "logits" (not with "entropy"). The paper
        calls s(.) logits and compares it with a threshold in [0, 1]; the threshold always acts on
        probabilities here.
      threshold: beta in [0, 1]; a pseudo-label is kept if its probability is strictly greater.
      consistency_weight: lambda_0 >= 0 of eq. loc-glob2.
      selection: "adaptive" (the method), "local" or "global" (the paper's Table 1).
      strong_augment: psi of eq. ce, a callable `(images, *, seed, round_num) -> images` on what
        the model takes, as float32 (images in [0, 1]); None for the identity. The default is the
        paper's sentence, 10 operations at magnitude 1; `RandAugment.single()` is the other
        reading of its "(1, 10)", 1 operation at magnitude 10.
      pseudo_label_view: Which view the experts see: "original" (eq. pseul0) or "augmented".
      consistency_view: Which view of the student enters the KL term: "original" (eq. loc-glob1
        writes xi, not psi(xi)) or "augmented".
      proximal_strength: mu >= 0; above 0 the labelled steps are FedProx's.
      seed: The seed of psi's randomness, an int of 32 bits.
      skip_discarded: Whether images without a kept label skip the student. Their loss is zero
        either way; set it to False for a model in which the images of a batch influence each
        other.

    Raises:
      ValueError: A field is out of its range; the message names it.
    """

    confidence: pseudo_labels.Confidence = "variance"
    confidence_input: str = "probabilities"
    threshold: float = 0.5
    consistency_weight: float = 1.0
    selection: str = "adaptive"
    strong_augment: Callable[..., tf.Tensor] | None = augmentation.RandAugment()
    pseudo_label_view: str = "original"
    consistency_view: str = "original"
    proximal_strength: float = 0.0
    seed: int = 0
    skip_discarded: bool = True

    def __post_init__(self):
        pseudo_labels.check_options(
            self.confidence, self.confidence_input, self.threshold, self.selection
        )
        pseudo_labels.check_number("consistency_weight", self.consistency_weight, 0.0)
        pseudo_labels.check_number("proximal_strength", self.proximal_strength, 0.0)
        for name in ("pseudo_label_view", "consistency_view"):
            if getattr(self, name) not in VIEWS:
                raise ValueError(
                    f"{name} must be one of {', '.join(VIEWS)}, got {getattr(self, name)!r}."
                )
        if self.strong_augment is not None and not callable(self.strong_augment):
            raise ValueError(
                "strong_augment must be None or a callable such as "
                f"tff_fedlabel.augmentation.RandAugment(), got {self.strong_augment!r}."
            )
        _client_work.check_seed(self.seed)


def build_fedlabel(
    model: tff.learning.models.FunctionalModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    config: FedLabelConfig = FedLabelConfig(),  # noqa: B008 (frozen)
    *,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    client_weighting: tff.learning.ClientWeighting = tff.learning.ClientWeighting.NUM_EXAMPLES,
    model_distributor: tff.learning.templates.DistributionProcess | None = None,
    model_aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    metrics_aggregator: Callable[..., Any] | None = None,
    loop_implementation: tff.learning.LoopImplementation = (
        tff.learning.LoopImplementation.DATASET_ITERATOR
    ),
    diagnose: bool = False,
) -> tff.learning.templates.LearningProcess:
    """Builds FedLabel as a learning process; the keyword tail is that of every method here.

    `process.next(state, client_data)` takes one `OrderedDict(labeled=<Dataset of
    OrderedDict(x=, y=)>, unlabeled=<Dataset of OrderedDict(x=)>)` per client, both batched; their
    numbers of batches are tau and tau'. Either may be empty.

    Args:
      model: Outputs logits `[batch, num_classes]`; `input_spec` gives x and y. The labelled loss
        is `model.loss`; pseudo-labels use per-image softmax cross-entropy.
      client_optimizer: Used in both phases, each from fresh state (eta).
      config: The method's parameters.
      server_optimizer: SGD with learning rate 1 by default, the paper's plain update.
      client_weighting: `NUM_EXAMPLES` is the paper's r_k; `UNIFORM` gives every client that
        contributed the same weight.
      model_distributor: As in `tff.learning.algorithms.build_weighted_fed_avg`.
      model_aggregator: Any weighted factory of `tff.aggregators`.
      metrics_aggregator: As in TFF.
      loop_implementation: `DATASET_ITERATOR` was the faster one on CPUs.
      diagnose: For simulations: unlabelled elements are `OrderedDict(x=, y=)` and the metric
        `pseudo_label_accuracy` is added. The y cannot change the update.

    Returns:
      A `tff.learning.templates.LearningProcess`. `metrics["client_work"]["train"]` holds the
      model's own metrics on the labelled batches and, float32 each: `labeled_loss`,
      `unlabeled_loss`, `kept_fraction`, `local_fraction` (of all images, where local was chosen),
      `agreement_fraction` (of all images, where both experts predict the same class),
      `consistency_weight` (mean lambda_k over kept images, 0 where the experts disagree),
      `images_used` (sum of r_k) and `rejected_clients`.

    Raises:
      ValueError: An argument is of the wrong kind, or `strong_augment` cannot work on the model's
        inputs.
    """
    _client_work.check_config(config, FedLabelConfig)
    x_spec = _client_work.check_images(model, config.strong_augment, "strong_augment")

    def to_student_view(images, round_num):
        """psi(images), in the dtype the model declares."""
        if config.strong_augment is None:
            return images
        augmented = config.strong_augment(
            augmentation.to_float(images), seed=config.seed, round_num=round_num
        )
        return augmentation.from_float(augmented, x_spec.dtype)

    def logits_of(client, weights, images, training):
        logits = model.predict_on_batch((weights, client.non_trainable), images, training=training)
        return tf.cast(logits, tf.float32)

    def unlabeled_gradients(client, local_weights):
        """The gradient of F_U (eq. unsuploss) for `_local_sgd.run`."""

        def gradients_fn(weights, batch, totals):
            images = batch["x"]
            batch_size = tf.cast(tf.shape(images)[0], tf.float32)
            view = images
            if config.pseudo_label_view == "augmented":
                view = to_student_view(images, client.round_num)
            # The two experts are frozen: no tape records them.
            chosen = pseudo_labels.select(
                logits_of(client, client.weights, view, training=False),
                logits_of(client, local_weights, view, training=False),
                confidence=config.confidence,
                confidence_input=config.confidence_input,
                threshold=config.threshold,
                selection=config.selection,
            )
            # lambda_k of eq. loc-glob2, 0 where the discarded expert points elsewhere.
            weight = config.consistency_weight * tf.where(
                chosen.agrees, chosen.confidence_ratio, tf.zeros_like(chosen.confidence_ratio)
            )

            def image_losses(weights, rows):
                """The summands of eq. unsuploss for some rows of the batch."""
                originals = tf.gather(images, rows)
                views = to_student_view(originals, client.round_num)
                if config.consistency_weight > 0 and config.consistency_view == "original":
                    # Both views of the student go through the network in one pass.
                    views = tf.concat([views, originals], axis=0)
                logits = logits_of(client, weights, views, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    tf.gather(chosen.labels, rows), logits[: tf.size(rows)]
                )
                if config.consistency_weight > 0:
                    losses += tf.gather(weight, rows) * pseudo_labels.kl_divergence(
                        logits[-tf.size(rows) :], tf.gather(chosen.discarded_logits, rows)
                    )
                return losses

            kept = tf.where(chosen.mask)[:, 0]

            def loss_and_gradients():
                with tf.GradientTape() as tape:
                    tape.watch(weights)
                    if config.skip_discarded:
                        losses = image_losses(weights, kept)
                    else:
                        losses = image_losses(weights, tf.range(tf.size(chosen.labels)))
                        losses = tf.where(chosen.mask, losses, tf.zeros_like(losses))
                    # The discarded images of the batch count as zeros in the mean (1 / b).
                    loss = tf.reduce_sum(losses) / batch_size
                return loss, tape.gradient(loss, weights, unconnected_gradients="zero")

            def nothing_kept():
                return tf.constant(0.0), tuple(tf.zeros_like(w) for w in weights)

            loss, gradients = tf.cond(tf.size(kept) > 0, loss_and_gradients, nothing_kept)

            def count(condition):
                return tf.reduce_sum(tf.cast(condition, tf.float32))

            more = collections.OrderedDict(
                loss=loss * batch_size,
                images=batch_size,
                kept=count(chosen.mask),
                local=count(chosen.chose_local),
                agree=count(chosen.agrees),
                weight=tf.reduce_sum(tf.gather(weight, kept)),
            )
            if diagnose:
                hits = tf.equal(chosen.labels, tf.cast(batch["y"], chosen.labels.dtype))
                more["correct"] = count(chosen.mask & tf.reshape(hits, tf.shape(chosen.mask)))
            return gradients, tf.nest.map_structure(tf.add, totals, more)

        return gradients_fn

    def client_update(client: _client_work.ClientInput) -> _client_work.ClientOutput:
        local_weights, supervised = _local_sgd.run(
            _local_sgd.supervised_gradients(
                model, client.non_trainable, client.weights, config.proximal_strength
            ),
            client.weights,
            client.labeled,
            _local_sgd.supervised_totals(model),
            optimizer=client_optimizer,
            hparams=client.hparams,
            loop_implementation=loop_implementation,
        )
        names = ["loss", "images", "kept", "local", "agree", "weight"]
        names += ["correct"] if diagnose else []
        student_weights, pseudo = _local_sgd.run(
            unlabeled_gradients(client, local_weights),
            client.weights,
            client.unlabeled,
            collections.OrderedDict((name, tf.constant(0.0)) for name in names),
            optimizer=client_optimizer,
            hparams=client.hparams,
            loop_implementation=loop_implementation,
        )
        metrics = collections.OrderedDict(
            labeled_loss=[supervised["loss"], supervised["images"]],
            unlabeled_loss=[pseudo["loss"], pseudo["images"]],
            kept_fraction=[pseudo["kept"], pseudo["images"]],
            local_fraction=[pseudo["local"], pseudo["images"]],
            agreement_fraction=[pseudo["agree"], pseudo["images"]],
            consistency_weight=[pseudo["weight"], pseudo["kept"]],
        )
        if diagnose:
            metrics["pseudo_label_accuracy"] = [pseudo["correct"], pseudo["kept"]]
        return _client_work.ClientOutput(
            # (w_L - w) + (w_U - w)
            delta=tuple(
                (local - w) + (student - w)
                for w, local, student in zip(
                    client.weights, local_weights, student_weights, strict=True
                )
            ),
            num_images=supervised["images"] + pseudo["kept"],
            model_metrics=supervised["model"],
            metrics=metrics,
        )

    return _client_work.build_learning_process(
        model,
        client_optimizer,
        client_update,
        server_optimizer=server_optimizer,
        client_weighting=client_weighting,
        model_distributor=model_distributor,
        model_aggregator=model_aggregator,
        metrics_aggregator=metrics_aggregator,
        loop_implementation=loop_implementation,
        diagnose=diagnose,
    )
