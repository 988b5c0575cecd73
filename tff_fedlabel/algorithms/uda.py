"""UDA on every client, averaged by FedAvg or, with its proximal term, by FedProx.

Qizhe Xie, Zihang Dai, Eduard Hovy, Minh-Thang Luong and Quoc V. Le, "Unsupervised Data Augmentation
for Consistency Training", NeurIPS 2020. As baselines of semi-supervised federated learning,
FedAvg-UDA and FedProx-UDA: Wonyong Jeong, Jaehong Yoon, Eunho Yang and Sung Ju Hwang, "Federated
Semi-Supervised Learning with Inter-Client Consistency & Disjoint Learning", ICLR 2021. For FedAvg
and FedProx see `supervised`. One local step, with labelled images x* and unlabelled ones x:

  1. p(x) is the prediction for the image itself; the target is its sharpened form
     softmax(z(x) / T), z the logits, without gradient. An image passes if max p(x) > beta, p not
     sharpened (confidence-based masking).
  2. One SGD step on
     mean CE(y*, p(x*)) + lambda / |B| sum 1[max p(x) > beta] KL(target || p(strong x)).
  3. With training signal annealing (TSA), labelled images with p(y* | x*) > eta_t are left out of
     the first mean, eta_t = alpha_t (1 - 1/K) + 1/K for K classes, alpha_t = t (linear),
     1 - exp(-5 t) (log) or exp(5 (t - 1)) (exp) of the progress t in [0, 1] of the training.

The server adds sum_k r_k delta_k / sum_k r_k to w, r_k the images that took part: the labelled ones
that TSA left in and the unlabelled ones that passed. Model calls of a step: see `_paired_steps`.

What differs from the paper and the authors' code:
  * Batches are the client's, where the code has 64 labelled and 7 x 64 unlabelled images. Where a
    client has fewer batches of one kind, that loss is 0 for the rest of its steps.
  * A client's labelled images are among its unlabelled ones, as in the code: those of the step's
    labelled batch are added to its unlabelled batch (`include_labeled`).
  * `weak_augment` changes x* and x, as the code flips and shifts every image it reads; the paper's
    formulas have the images themselves (`weak_augment=None`). The code flips and shifts the
    strongly augmented image as well; here it is strong(x).
  * The strong augmentation is RandAugment of two operations, as in the code, but always applied and
    at one magnitude, and Cutout does not follow.
  * TSA is off, as in the code's script for CIFAR-10 (the UDA of FedMatch's authors has "exp"). Its
    t is the round divided by `tsa_rounds`, the same for all steps of a round, since a client knows
    the round only; the code has the step divided by all steps.
  * Optimizer, learning rate and its schedule are the run's; no weight decay. The code's entropy
    term, 0 by default, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tff_fedlabel import _validation, augmentation, pseudo_labels
from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _method, _paired_steps

# alpha_t of training signal annealing, by the progress t of the training, float32 [] in [0, 1].
SCHEDULES = {
    "linear": lambda t: t,
    "log": lambda t: 1.0 - tf.exp(-5.0 * t),
    "exp": lambda t: tf.exp(5.0 * (t - 1.0)),
}
NO_TSA = "none"


@dataclasses.dataclass(frozen=True)
class FedAvgUdaConfig:
    """UDA's own parameters.

    Attributes:
      threshold: beta in [0, 1]; an unlabelled image counts if the largest probability of its
        prediction is strictly greater. .8, as in the code's script for CIFAR-10.
      temperature: T of the softmax that sharpens the target, 1e-6 to 1e6; 1 leaves it as it is. .4,
        as there.
      unlabeled_weight: lambda > 0, the weight of the loss on unlabelled images. 1, as there.
      tsa: Training signal annealing: "none", "linear", "log" or "exp".
      tsa_rounds: Rounds over which TSA lets in all labelled images, the number of rounds of the
        run; only with TSA, which needs it.
      include_labeled: Whether labelled images are among the unlabelled ones, too.
      strong_augment: The augmentation of the unlabelled images, a callable `(images, *, seed) ->
        images` on what the model takes, as float32 (images in [0, 1]), `seed` an int32 [2] derived
        from seed, round and step; None for the identity.
      weak_augment: What changes labelled images and those that give the target, called in the same
        way; None for the identity.
      seed: The seed of the augmentations' randomness, a 32-bit int.
      skip_discarded: Whether images that do not pass are skipped. Their loss is zero either way;
        set it to False for a model in which the images of a batch influence each other.

    Raises:
      ValueError: A field is out of its range or of the wrong type; the message names it.
    """

    threshold: float = 0.8
    temperature: float = 0.4
    unlabeled_weight: float = 1.0
    tsa: str = NO_TSA
    tsa_rounds: int | None = None
    include_labeled: bool = True
    strong_augment: Callable[..., tf.Tensor] | None = augmentation.RandAugment(2, 10.0)
    weak_augment: Callable[..., tf.Tensor] | None = augmentation.WeakAugment()
    seed: int = 0
    skip_discarded: bool = True

    def __post_init__(self):
        check = _validation
        checked = _paired_steps.checked(self)
        checked["temperature"] = check.check_temperature("temperature", self.temperature)
        check.check_name("tsa", self.tsa, (NO_TSA, *SCHEDULES))
        if self.tsa_rounds is not None:
            checked["tsa_rounds"] = check.check_int("tsa_rounds", self.tsa_rounds)
        elif self.tsa != NO_TSA:
            raise ValueError(
                f"tsa_rounds must be given with tsa={self.tsa!r}: the number of rounds of the run."
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True)
class FedProxUdaConfig(FedAvgUdaConfig):
    """UDA's parameters and FedProx's.

    Attributes:
      proximal_strength: mu >= 0 of the added loss `mu / 2 ||w - w0||^2`, in each step.
    """

    proximal_strength: float = 0.01

    def __post_init__(self):
        super().__post_init__()
        strength = _validation.check_number("proximal_strength", self.proximal_strength)
        object.__setattr__(self, "proximal_strength", strength)


def client_update(setup: _method.Setup, client: _method.Client) -> _method.ClientOutput:
    """Local steps of UDA, each on a labelled and an unlabelled batch.

    r_k is the number of images that took part, each counted once in a step: labelled images but
    for those that TSA leaves out, and unlabelled ones that pass the threshold. The metrics are
    `labeled_loss`, `unlabeled_loss` (over all images that are used as unlabelled), `kept_fraction`
    (of the client's unlabelled images) and, with `diagnose`, `pseudo_label_accuracy` of those kept.
    """
    keep = None if setup.config.tsa == NO_TSA else not_learned_yet
    rules = _paired_steps.Rules(target=sharpened, distance=divergence, keep=keep)
    return _paired_steps.client_update(setup, client, rules)


def sharpened(config, logits):
    """1[max p(x) > beta], and the logits of softmax(z(x) / T)."""
    surest = tf.reduce_max(pseudo_labels.softmax(logits), axis=-1)
    return surest > config.threshold, logits / config.temperature


def divergence(target_logits, logits):
    """KL(target || p(strong x)) of each image."""
    return pseudo_labels.kl_divergence(target_logits, logits)


def not_learned_yet(config, round_num, logits, labels):
    """TSA: which labelled images have p(y* | x*) <= eta_t."""
    progress = tf.minimum(tf.cast(round_num, tf.float32) / config.tsa_rounds, 1.0)
    flat = 1.0 / tf.cast(tf.shape(logits)[-1], tf.float32)
    threshold = SCHEDULES[config.tsa](progress) * (1.0 - flat) + flat
    probabilities = pseudo_labels.softmax(tf.cast(logits, tf.float32))
    right = tf.gather(probabilities, tf.reshape(labels, [-1]), batch_dims=1)
    return ~(right > threshold)


def advice(config: FedAvgUdaConfig, rounds: int) -> str | None:
    """Says so if the run ends before TSA lets in all labelled images."""
    if config.tsa == NO_TSA or rounds >= config.tsa_rounds:
        return None
    return (
        f"tsa_rounds is {config.tsa_rounds}, and this run ends after {rounds} rounds: labelled "
        f"images are left out to its end; tsa={config.tsa} is meant to let in all of them by then."
    )


FEDAVG = _method.Method("fedavg_uda", FedAvgUdaConfig, client_update, advice=advice)
FEDPROX = _method.Method("fedprox_uda", FedProxUdaConfig, client_update, advice=advice)
