"""FixMatch on every client, averaged by FedAvg or, with its proximal term, by FedProx.

Kihyuk Sohn, David Berthelot, Chun-Liang Li, Zizhao Zhang, Nicholas Carlini, Ekin D. Cubuk, Alex
Kurakin, Han Zhang and Colin Raffel, "FixMatch: Simplifying Semi-Supervised Learning with
Consistency and Confidence", NeurIPS 2020. As baselines of semi-supervised federated learning,
FedAvg-FixMatch and FedProx-FixMatch: Wonyong Jeong, Jaehong Yoon, Eunho Yang and Sung Ju Hwang,
"Federated Semi-Supervised Learning with Inter-Client Consistency & Disjoint Learning", ICLR 2021.
For FedAvg and FedProx see `supervised`. One local step, with B labelled images x and mu B
unlabelled ones u:

  1. q = p(alpha(u)), the prediction for a weakly augmented view; the pseudo-label is argmax q, kept
     if max q >= tau.
  2. One SGD step on
     1/B sum CE(y, p(alpha(x))) + lambda_u / (mu B) sum 1[max q >= tau] CE(argmax q, p(A(u))),
     A the strong augmentation, both p of the model as it is before the step.

The server adds sum_k r_k delta_k / sum_k r_k to w, r_k the images that took part: the labelled ones
and the unlabelled ones that were kept. Model calls of a step: see `_paired_steps`.

What differs from the paper and the authors' code:
  * Batches are the client's: B and mu B are the sizes of the two batches of a step, where the paper
    has B = 64 and mu = 7. Where a client has fewer batches of one kind, that loss is 0 for the rest
    of its steps.
  * A client's labelled images are among its unlabelled ones, as in the paper: those of the step's
    labelled batch are added to its unlabelled batch (`include_labeled`).
  * A is RandAugment of two operations, as in the paper, but always applied and at one magnitude,
    and Cutout does not follow. The authors' code applies A to another weakly augmented view; here,
    as the paper writes, it is A(u).
  * Optimizer, learning rate and its schedule are the run's. No weight decay, no exponential moving
    average of the weights: clients start anew each round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tff_fedlabel import _validation, augmentation, pseudo_labels
from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _method, _paired_steps


@dataclasses.dataclass(frozen=True)
class FedAvgFixMatchConfig:
    """FixMatch's own parameters, with the symbols of the paper.

    Attributes:
      threshold: tau in [0, 1]; a pseudo-label is kept if its probability is not below it. .95, the
        paper's.
      unlabeled_weight: lambda_u > 0, the weight of the loss on unlabelled images. 1, the paper's.
      include_labeled: Whether labelled images are among the unlabelled ones, too.
      strong_augment: A, a callable `(images, *, seed) -> images` on what the model takes, as
        float32 (images in [0, 1]), `seed` an int32 [2] derived from seed, round and step; None for
        the identity.
      weak_augment: alpha, called in the same way; None for the identity.
      seed: The seed of the augmentations' randomness, a 32-bit int.
      skip_discarded: Whether images without a kept label are skipped. Their loss is zero either
        way; set it to False for a model in which the images of a batch influence each other.

    Raises:
      ValueError: A field is out of its range or of the wrong type; the message names it.
    """

    threshold: float = 0.95
    unlabeled_weight: float = 1.0
    include_labeled: bool = True
    strong_augment: Callable[..., tf.Tensor] | None = augmentation.RandAugment(2, 10.0)
    weak_augment: Callable[..., tf.Tensor] | None = augmentation.WeakAugment()
    seed: int = 0
    skip_discarded: bool = True

    def __post_init__(self):
        for name, value in _paired_steps.checked(self).items():
            object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True)
class FedProxFixMatchConfig(FedAvgFixMatchConfig):
    """FixMatch's parameters and FedProx's.

    Attributes:
      proximal_strength: mu >= 0 of the added loss `mu / 2 ||w - w0||^2`, in each step.
    """

    proximal_strength: float = 0.01

    def __post_init__(self):
        super().__post_init__()
        strength = _validation.check_number("proximal_strength", self.proximal_strength)
        object.__setattr__(self, "proximal_strength", strength)


def client_update(setup: _method.Setup, client: _method.Client) -> _method.ClientOutput:
    """Local steps of FixMatch, each on a labelled and an unlabelled batch.

    r_k is the number of images that took part, each counted once in a step: labelled images and
    unlabelled ones whose label was kept. The metrics are `labeled_loss`, `unlabeled_loss` (over
    all images that are used as unlabelled), `kept_fraction` (of the client's unlabelled images)
    and, with `diagnose`, `pseudo_label_accuracy` of those kept.
    """
    return _paired_steps.client_update(setup, client, RULES)


def pseudo_label(config, logits):
    """1[max q >= tau] and argmax q, from the logits of q."""
    surest = tf.reduce_max(pseudo_labels.softmax(logits), axis=-1)
    return surest >= config.threshold, tf.argmax(logits, axis=-1)


def cross_entropy(labels, logits):
    """CE(argmax q, p(A(u))) of each image."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


RULES = _paired_steps.Rules(target=pseudo_label, distance=cross_entropy)

FEDAVG = _method.Method("fedavg_fixmatch", FedAvgFixMatchConfig, client_update)
FEDPROX = _method.Method("fedprox_fixmatch", FedProxFixMatchConfig, client_update)
