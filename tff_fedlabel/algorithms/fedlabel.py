"""FedLabel: a client labels its images with the more confident of its local and the global model.

Yae Jee Cho, Gauri Joshi and Dimitrios Dimitriadis, "Local or Global: Selective Knowledge
Assimilation for Federated Learning with Limited Labels", ICCV 2023. Equation labels below are
those of the paper's source. One client in one round (Algorithm 1):

  1. tau SGD steps on labelled batches take the global model w to the local model w_L
     (eq. local_model_update); delta_L = w_L - w (eq. suplocalupdate).
  2. For each unlabelled batch, w and w_L, both frozen, predict the classes. The more confident one
     labels each image (eq. pseul0), and a label is kept if its probability exceeds beta (eq.
     pseul).
  3. One SGD step moves w_U, which also starts at w, on the cross-entropy of the strongly augmented
     image (eq. ce) plus, where the discarded expert agrees, its weighted divergence from that
     expert (eqs. loc-glob1, loc-glob2), averaged over the whole batch (eq. unsuploss);
     delta_U = w_U - w (eq. unsuplocalupdate).
  4. The client sends delta_L + delta_U and r_k, the number of images that took part.

The server adds sum_k r_k delta_k / sum_k r_k to w.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable

from tff_fedlabel import _validation, augmentation, pseudo_labels
from tff_fedlabel._autograph import as_written
from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _local_training, _method, _views

VIEWS = ("original", "augmented")


@dataclasses.dataclass(frozen=True)
class FedLabelConfig:
    """FedLabel's own parameters, with the symbols of the paper.

    Attributes:
      confidence: h of eq. pseul0: "variance" (the paper's) or "entropy" (1 - H / log N). In Python
        also a callable `[batch, classes] -> [batch]`, not negative, higher = more confident.
      confidence_input: What h sees: "probabilities" or "logits" (not with "entropy"). The paper
        calls s(.) logits and compares it with a threshold in [0, 1]; the threshold always acts on
        probabilities here.
      threshold: beta in [0, 1]; a pseudo-label is kept if its probability is strictly greater.
      consistency_weight: lambda_0 >= 0 of eq. loc-glob2.
      selection: "adaptive" (the method), "local" or "global" (the paper's Table 1).
      strong_augment: psi of eq. ce, a callable `(images, *, seed) -> images` on what the model
        takes, as float32 (images in [0, 1]), `seed` an int32 [2] derived from seed, round and
        step; None for the identity. The default follows the paper's sentence, 10 operations at
        magnitude 1; `RandAugment.single()` is the other reading of its "(1, 10)", 1 operation at
        magnitude 10.
      pseudo_label_view: Which view the experts see: "original" (eq. pseul0) or "augmented".
      consistency_view: Which view the student sees in the KL term: "original" (eq. loc-glob1
        writes xi, not psi(xi)) or "augmented".
      proximal_strength: mu >= 0; above 0 the labelled steps are FedProx's.
      seed: The seed of psi's randomness, a 32-bit int.
      skip_discarded: Whether the student skips images without a kept label. Their loss is zero
        either way; set it to False for a model in which the images of a batch influence each
        other.

    Raises:
      ValueError: A field is out of its range or of the wrong type; the message names it.
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
        checked = {
            "threshold": _validation.check_number("threshold", self.threshold, 0.0, 1.0),
            "seed": _validation.check_seed(self.seed),
            "skip_discarded": _validation.check_flag("skip_discarded", self.skip_discarded),
        }
        for name in ("consistency_weight", "proximal_strength"):
            checked[name] = _validation.check_number(name, getattr(self, name))
        for name in ("pseudo_label_view", "consistency_view"):
            _validation.check_name(name, getattr(self, name), VIEWS)
        _validation.check_callable_or_none(
            "strong_augment", self.strong_augment, "tff_fedlabel.augmentation.RandAugment()"
        )
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def client_update(setup: _method.Setup, client: _method.Client) -> _method.ClientOutput:
    """One client in one round of FedLabel: Algorithm 1 of the paper.

    The metrics are `labeled_loss`, `unlabeled_loss`, `kept_fraction`, `local_fraction` (of all
    images, where local was chosen), `agreement_fraction` (of all images, where both experts predict
    the same class), `consistency_weight` (mean lambda_k over kept images, 0 where the experts
    disagree) and, with `diagnose`, `pseudo_label_accuracy`.
    """
    local = _local_training.run(
        setup,
        client.hparams,
        _local_training.labeled_step(setup, client, setup.config.proximal_strength),
        client.weights,
        client.labeled,
    )
    student = _local_training.run(
        setup,
        client.hparams,
        functools.partial(_student_step, setup, client, local.weights),
        client.weights,
        client.unlabeled,
    )
    return _method.ClientOutput(
        # (w_L - w) + (w_U - w)
        delta=tuple(
            (w_local - w) + (w_student - w)
            for w, w_local, w_student in zip(
                client.weights, local.weights, student.weights, strict=True
            )
        ),
        num_examples=local.num_examples + student.num_examples,
        model_metrics=local.model_metrics,
        metrics=collections.OrderedDict([*local.metrics.items(), *student.metrics.items()]),
    )


@as_written
def _student_step(setup, client, local_weights, weights, batch, step_num):
    """Steps 2 and 3 for one batch: labels it and takes the gradient of F_U (eq. unsuploss)."""
    config, images = setup.config, batch["x"]
    seed = augmentation.step_seed(config.seed, client.round_num, step_num)
    chosen, usable = _label(setup, client, local_weights, images, seed)
    # lambda_k of eq. loc-glob2, 0 where the experts disagree or no label is kept: values that are
    # not finite there must not reach the gradient, not even multiplied by 0.
    counts = chosen.agrees & chosen.mask
    consistency_weight = config.consistency_weight * tf.where(
        counts, chosen.confidence_ratio, tf.zeros_like(chosen.confidence_ratio)
    )
    discarded_logits = _views.zero_unless(chosen.mask, chosen.discarded_logits)
    if not config.skip_discarded:
        images = _views.zero_unless(usable, images)

    def image_losses(weights, rows):
        """The summands of eq. unsuploss for some rows of the batch."""
        originals = _views.rows(images, rows)
        views = _views.augmented(config.strong_augment, originals, seed)
        if config.consistency_weight > 0 and config.consistency_view == "original":
            # Both views of the student go through the network in one pass.
            views = tf.nest.map_structure(
                lambda view, part: tf.concat([view, part], axis=0), views, originals
            )
        logits = _views.logits(setup, client, weights, views, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.gather(chosen.labels, rows), logits[: tf.size(rows)]
        )
        if config.consistency_weight > 0:
            losses += tf.gather(consistency_weight, rows) * pseudo_labels.kl_divergence(
                logits[-tf.size(rows) :], tf.gather(discarded_logits, rows)
            )
        return losses

    loss, gradients = _local_training.mean_over_kept(
        image_losses, chosen.mask, weights, config.skip_discarded
    )
    number = tf.cast(tf.size(chosen.mask), tf.float32)
    kept = _views.count(chosen.mask)
    metrics = collections.OrderedDict(
        unlabeled_loss=(loss * number, number),
        kept_fraction=(kept, number),
        local_fraction=(_views.count(chosen.chose_local), number),
        agreement_fraction=(_views.count(chosen.agrees), number),
        consistency_weight=(tf.reduce_sum(consistency_weight), kept),
    )
    if setup.diagnose:
        hidden = tf.reshape(tf.cast(batch["y"], chosen.labels.dtype), [-1])
        hits = tf.equal(chosen.labels, hidden)
        metrics["pseudo_label_accuracy"] = (_views.count(chosen.mask & hits), kept)
    return _local_training.Step(gradients, kept, metrics)


def _label(setup, client, local_weights, images, seed):
    """Labels each image with the more confident of the two frozen experts, w and w_L.

    Returns a `pseudo_labels.Selection` that keeps no image that is not usable, and which are.
    """
    config, views = setup.config, images
    if config.pseudo_label_view == "augmented":
        views = _views.augmented(config.strong_augment, images, seed)
    of_experts = [
        _views.logits(setup, client, weights, views, training=False)
        for weights in (client.weights, local_weights)
    ]
    chosen = pseudo_labels.select(
        *of_experts,
        confidence=config.confidence,
        confidence_input=config.confidence_input,
        threshold=config.threshold,
        selection=config.selection,
    )
    usable = _views.usable(images, *of_experts)
    return chosen._replace(mask=chosen.mask & usable), usable


METHOD = _method.Method("fedlabel", FedLabelConfig, client_update)
