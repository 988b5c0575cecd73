"""FedTriNet: three networks vote on a client's unlabelled images.

Liwei Che, Zewei Long, Jiaqi Wang, Yaqing Wang, Houping Xiao and Fenglong Ma, "FedTriNet: A Pseudo
Labeling Method with Three Players for Federated Semi-supervised Learning", IEEE International
Conference on Big Data 2021, pages 715-724, doi 10.1109/BigData52589.2021.9671374, arXiv 2109.05612.
Constants and details are those of the authors' code (github.com/Michelingweo/FedTriNet), below "the
source". One client in one round:

  Phase 1 (`warmup_rounds`): FedAvg on the labelled batches.
  Phase 2, in its round r = 0, 1, ...:
  1. Splice: the first layers of the received global model w, which are averaged over the clients,
     on the remaining layers of the client's own last model w_k; those are fine-tuned on the
     labelled batches, the first layers being frozen.
  2. Vote: q = softmax(w_k) + softmax(w) + softmax(spliced) for each unlabelled image. Its
     pseudo-label is argmax q, kept if max q >= theta(r).
  3. Train on labelled and pseudo-labelled batches, L = CE_labelled + alpha(r) CE_pseudo, each a
     mean over its images in the batch; from w on, or from the spliced network on.
  4. Send the trained model and the sums behind m: that of max softmax(w) over the unlabelled images
     and their number. The trained model is w_k in the client's next round.

The server takes the uniform mean of the models and turns m into the threshold on q, a sum of three:
theta(r) = 2.8 m for r < 10, 2.8 m (1 - .02 r) for r < 35, and 1.4 m from then on (more than the
.896 m of round 34). alpha(r) is 0 up to T1, then grows linearly to .5 at T2.

Cost of a step on a labelled and an unlabelled batch: a forward and a backward pass on the labelled
one to fine-tune, 3 forward passes to vote, and a forward and a backward pass on each to train.
FedLabel's table (tab:comp-cost) counts 3P + 2B: the vote and two gradients, without the fine-tuning
and the gradients' forward passes. Where alpha(r) is 0 nobody votes: w alone is measured (1P), and
only training that begins at the spliced network needs the fine-tuning. Communication is 2R, w and
the trained model; w_k stays with the client.

Where this differs from the source:

  * Labels are given anew in each round, to the images drawn in it, and used in that round only. The
    source gives an image its first label for good, in a table of all images. Here a client's
    batches differ from round to round, and no number tells an image again in a later one.
  * m comes from the clients' unlabelled images. The source measures it on the test set, which no
    method may see.
  * m is measured in each round, since FedLabel's table, which is by the round, has clients send it
    and the server threshold; `refresh_mean=False` measures it once, as the source does, at the end
    of phase 1.
  * The source is two scripts. One has the threshold and alpha(r), with .15 in place of .5, trains
    from w on, and adds a discriminator, which is left out here. The other trains from the spliced
    network on and has neither threshold nor alpha(r), though its library has the latter.
    `start_from` chooses between the two beginnings. The default is w: with the other one the
    clients' own layers are never brought together, and where few clients take part in a round their
    mean loses accuracy (experiments/results/digits_fedtrinet_search.csv).
  * A client that takes part for the first time in phase 2 has no w_k. It votes and splices with w
    in its place, so q is a sum of three all the same. The source begins with a round of everybody.
  * Dropout is off while voting; the source leaves it on. For colour images the source sets a flag
    to freeze the first layers that has no effect; here they are frozen.
  * T1 and T2 are rounds of phase 2; the source counts epochs (50 and 150), 5 a round.
  * The optimizer, the batches and their number come from the caller. The source has SGD of learning
    rate .01 and momentum .5, 5 epochs a round, batches of 50.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

from tff_fedlabel import _validation
from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _fedtrinet_steps, _local_training, _method

STARTS = ("global", "spliced")


@dataclasses.dataclass(frozen=True)
class FedTriNetConfig:
    """FedTriNet's parameters; the defaults are the source's. Rounds are those of phase 2, from 0.

    Attributes:
      warmup_rounds: Rounds of phase 1, FedAvg on labels, 0 or more.
      first_layers: Number of first layers that the spliced network has from the global model, 0 or
        more. A layer is a trainable weight of two or more dimensions and the vectors after it, its
        bias and normalisation. 2 are the convolutions conv1 and conv2 of the source's networks: of
        `cnn` both convolutions, of a ResNet the stem and the first convolution after it. The last
        layer is always the client's own.
      start_from: What the training of phase 2 starts from: "global" (w) or "spliced".
      threshold_scale: theta(r) as a multiple of m in the first rounds, 0 to 3.
      threshold_hold: The number of these rounds.
      threshold_decay: Then the threshold is the share 1 - decay r of its first value, 0 to 1.
      threshold_end: The round from which it is the final share of its first value.
      threshold_final: That share, 0 to 1.
      refresh_mean: Whether m is measured in each round, or once, in the last round of phase 1 (in
        the first later one in which a client has unlabelled images if none has there).
      ramp_start: T1, the round up to which pseudo-labels have no weight, 0 or more.
      ramp_end: T2 >= T1, the round from which they have their full weight.
      pseudo_label_weight: The full weight of the loss on pseudo-labelled images, 0 or more.
      seed: Unused; every configuration has one.

    Raises:
      ValueError: A field is out of its range or of the wrong type; the message names it.
    """

    warmup_rounds: int = 40
    first_layers: int = 2
    start_from: str = "global"
    threshold_scale: float = 2.8
    threshold_hold: int = 10
    threshold_decay: float = 0.02
    threshold_end: int = 35
    threshold_final: float = 0.5
    refresh_mean: bool = True
    ramp_start: int = 10
    ramp_end: int = 30
    pseudo_label_weight: float = 0.5
    seed: int = 0

    def __post_init__(self):
        check = _validation
        checked: dict[str, Any] = {"seed": check.check_seed(self.seed)}
        whole = ("warmup_rounds", "first_layers", "threshold_hold", "threshold_end", "ramp_start")
        for name in (*whole, "ramp_end"):
            checked[name] = check.check_int(name, getattr(self, name), 0)
        check.check_name("start_from", self.start_from, STARTS)
        for name, most in (("scale", 3.0), ("decay", 1.0), ("final", 1.0)):
            name = f"threshold_{name}"
            checked[name] = check.check_number(name, getattr(self, name), 0.0, most)
        name = "pseudo_label_weight"
        checked[name] = check.check_number(name, self.pseudo_label_weight)
        checked["refresh_mean"] = check.check_flag("refresh_mean", self.refresh_mean)
        if self.ramp_end < self.ramp_start:
            raise ValueError(
                f"ramp_end must be ramp_start, {self.ramp_start}, or more, got {self.ramp_end}."
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def threshold_factor(config: FedTriNetConfig, r: tf.Tensor) -> tf.Tensor:
    """theta(r) / m for round r of phase 2, an int32 []; float32 []."""
    falling = 1.0 - config.threshold_decay * tf.cast(r, tf.float32)
    share = tf.where(r < config.threshold_end, falling, config.threshold_final)
    return config.threshold_scale * tf.where(r < config.threshold_hold, 1.0, share)


def ramped_weight(config: FedTriNetConfig, r: tf.Tensor) -> tf.Tensor:
    """alpha(r) for round r of phase 2, an int32 [] that is negative in phase 1; float32 []."""
    length = max(config.ramp_end - config.ramp_start, 1)
    rising = tf.cast(r - config.ramp_start, tf.float32) / length
    share = tf.where(r < config.ramp_end, tf.maximum(rising, 0.0), 1.0)
    return config.pseudo_label_weight * share


def num_first_weights(shapes: list[Any], first_layers: int) -> int:
    """How many of the trainable weights, in order, belong to the first layers.

    Args:
      shapes: The shapes of all trainable weights.
      first_layers: As in `FedTriNetConfig`; at most all layers but the last are counted.
    """
    starts = [number for number, shape in enumerate(shapes) if len(shape) > 1]
    first_layers = min(first_layers, len(starts) - 1)
    # What stands before the first layer, such as a normalisation of the images, is a part of it.
    return starts[first_layers] if first_layers > 0 else 0


class _Plan(NamedTuple):
    """What a client does in a round; scalars.

    Attributes:
      second_phase: bool.
      alpha: alpha(r), float32.
      threshold: theta(r), float32; 0 while m is not known.
      labels: Whether images are labelled: alpha(r) is above 0 and m is known, bool.
      measures: Whether m is measured in this round, bool.
    """

    second_phase: Any
    alpha: Any
    threshold: Any
    labels: Any
    measures: Any


def _plan(config, client) -> _Plan:
    r = client.round_num - config.warmup_rounds
    state = client.server_state
    mean = tf.math.divide_no_nan(state["max_probability"], state["images"])
    known, alpha = state["images"] > 0, ramped_weight(config, r)
    return _Plan(
        second_phase=r >= 0,
        alpha=alpha,
        threshold=mean * threshold_factor(config, r),
        labels=(r >= 0) & (alpha > 0) & known,
        measures=(r >= -1) & (config.refresh_mean | ~known),
    )


def client_update(setup: _method.Setup, client: _method.Client) -> _method.ClientOutput:
    """One client in one round of FedTriNet.

    r_k is the number of labelled and pseudo-labelled images that it trained on. The metrics are
    `labeled_loss`; `unlabeled_loss` (mean over the kept images); `kept_fraction` (of the images
    voted on); `threshold` (theta(r), 0 where nobody votes); `max_probability` (m of this round, 0
    where it is not measured); `pseudo_label_weight` (alpha(r)); and, with `diagnose`,
    `pseudo_label_accuracy`.
    """
    config, weights = setup.config, client.weights
    plan = _plan(config, client)
    remembers = client.memory["exists"] > 0
    own = _where(remembers, client.memory["weights"], weights)
    from_spliced = config.start_from == "spliced"
    spliced = _splice(setup, client, own, plan.second_phase if from_spliced else plan.labels)

    # Where images are labelled, the vote measures w at no cost.
    measured = _local_training.run(
        setup,
        client.hparams,
        functools.partial(_fedtrinet_steps.measuring_step, setup, client),
        weights,
        _only_if(plan.measures & ~plan.labels, client.unlabeled),
    )
    trained = _local_training.run(
        setup,
        client.hparams,
        functools.partial(
            _fedtrinet_steps.training_step, setup, client, plan, (own, weights, spliced)
        ),
        _where(plan.second_phase, spliced, weights) if from_spliced else weights,
        _local_training.pairs(client.labeled, _only_if(plan.labels, client.unlabeled)),
    )
    metrics = trained.metrics
    total, images = (
        a + b
        for a, b in zip(
            metrics["max_probability"], measured.metrics["max_probability"], strict=True
        )
    )
    share = tf.cast(plan.measures, tf.float32)
    one = tf.ones([])
    took_part = trained.num_examples > 0
    return _method.ClientOutput(
        delta=tuple(w - w0 for w, w0 in zip(trained.weights, weights, strict=True)),
        num_examples=trained.num_examples,
        model_metrics=trained.model_metrics,
        metrics=collections.OrderedDict(
            metrics,
            max_probability=(total, images),
            threshold=(
                tf.where(plan.labels, plan.threshold, 0.0),
                tf.cast(plan.labels, tf.float32),
            ),
            pseudo_label_weight=(plan.alpha, one),
        ),
        sent=collections.OrderedDict(max_probability=share * total, images=share * images),
        memory=collections.OrderedDict(
            weights=_where(took_part, trained.weights, client.memory["weights"]),
            exists=tf.where(took_part, one, client.memory["exists"]),
        ),
    )


def _splice(setup, client, own, needed):
    """The first layers of the global model on the client's own others, fine-tuned if needed."""
    shapes = [w.shape for w in client.weights]
    number = num_first_weights(shapes, setup.config.first_layers)
    first = client.weights[:number]
    labeled_step = _local_training.labeled_step(setup, client)

    def tuning_step(rest, batch, step_num):
        step = labeled_step((*first, *rest), batch, step_num)
        return step._replace(gradients=step.gradients[number:])

    tuned = _local_training.run(
        setup, client.hparams, tuning_step, own[number:], _only_if(needed, client.labeled)
    )
    return (*first, *tuned.weights)


def _only_if(condition, dataset):
    """All batches of the dataset, or none."""
    return dataset.take(tf.where(condition, tf.constant(-1, tf.int64), 0))


def _where(condition, weights, others):
    return tuple(tf.where(condition, a, b) for a, b in zip(weights, others, strict=True))


def initial_memory(setup: _method.Setup) -> Any:
    """A client's own last model w_k, and whether there is one: 1 or 0."""
    return collections.OrderedDict(
        weights=tuple(tf.zeros_like(w) for w in setup.model.initial_weights[0]),
        exists=tf.zeros([]),
    )


def server_state(setup: _method.Setup) -> Any:
    """The sums of which m is the quotient; nothing is known at first."""
    del setup
    return collections.OrderedDict(max_probability=tf.zeros([]), images=tf.zeros([]))


def server_update(setup: _method.Setup, state: Any, sent: Any) -> Any:
    """The sums over the clients of the last round in which some image was measured."""
    del setup
    return tf.nest.map_structure(
        lambda new, old: tf.where(sent["images"] > 0, new, old), sent, state
    )


def advice(config: FedTriNetConfig, rounds: int) -> str | None:
    """Says so if the run ends before its first pseudo-label."""
    # The first r with alpha(r) > 0; m is known after a round.
    r = config.ramp_end if config.ramp_end == config.ramp_start else config.ramp_start + 1
    first = max(config.warmup_rounds + r, 1) + 1
    if rounds >= first:
        return None
    return (
        f"fedtrinet labels images from round {first} on (warmup_rounds {config.warmup_rounds}, "
        f"ramp_start {config.ramp_start}), and this run ends after {rounds}: it is FedAvg on the "
        "labelled images."
    )


METHOD = _method.Method(
    "fedtrinet",
    FedTriNetConfig,
    client_update,
    server_state=server_state,
    server_update=server_update,
    initial_memory=initial_memory,
    advice=advice,
    uniform_mean=True,
)
