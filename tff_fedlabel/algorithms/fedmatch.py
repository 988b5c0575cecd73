"""FedMatch: weights in two parts, one for labelled and one for unlabelled images, and helpers.

Wonyong Jeong, Jaehong Yoon, Eunho Yang and Sung Ju Hwang, "Federated Semi-Supervised Learning with
Inter-Client Consistency & Disjoint Learning", ICLR 2021; its scenario "labels at client". The model
is theta = sigma + psi. In a round

  1. A client receives sigma and psi and, once there are any, the psi of its H helpers: the other
     clients whose models answered a fixed random image most alike. A helper's model is the received
     sigma + the helper's psi.
  2. Labelled images move sigma, psi frozen: L_s(sigma) = lambda_s CE(y, p(x)).
  3. Unlabelled images move psi, sigma frozen: L_u(psi) = lambda_a CE(y^, p(RandAugment(u))) +
     lambda_i / H sum_j KL(p_j(u) || p(u)) + lambda_l2 ||sigma - psi||^2 + lambda_l1 ||psi||_1.
     Each of client and helpers has a vote for the class of u; y^ is the class with most of them (of
     several, the first), and is kept if max p(u) >= tau. 2 and 3 take turns, batch by batch.
  4. The server takes the plain mean of the clients' sigma, and that of their psi.

Passes for each pair of batches: labelled, a forward and a backward one (P + B); unlabelled, (H + 1)
P + B on the batch and P + B on its kept images, augmented. With R the bytes of the weights, a
client receives 2 R, and H R for its helpers (`helper_bytes`), and sends 2 R. What this package
moves is more: a client's memory, two snapshots of its psi, is 2 R; the client receives and returns
its own, and receives those of its helpers whole.

Here the weights of the process are theta, so that evaluation and export see the whole model; psi is
its state at the server, and sigma is theta - psi. A server optimizer other than the plain mean, or
another weighting or aggregator, acts on theta, and so on sigma: psi is always the plain mean.

Where the paper leaves a choice, or the authors' code (github.com/wyjeong/FedMatch) differs:

* tau is the paper's .85; the code has .75 (`threshold`).
* The KL term is averaged over all images of the batch, as the paper writes it; the code leaves out
  those below tau (`consistency_on`). CE is averaged over the kept images, as in the code.
* The paper has one weight lambda_ICCS for both; the code two of the same value, `lambda_i` and
  `lambda_a`.
* Helpers are refreshed every 10 rounds, the first time in the 10th, and kept in between; in the
  code a client has helpers in the rounds of a refresh only (`helpers_at_refresh_only`). As in the
  code, a client has none, and is none, before it has taken part.
* Each client computes its answer to the fixed image itself; in the code the server does.
* psi starts as .2 sigma, as in the code, but theta, not sigma, starts as the model's own weights:
  all methods start from the same model, which may be a trained one. sigma is that / 1.2.
* Each part has client-optimizer state of its own. A client without labelled images leaves sigma as
  it was, one without unlabelled images psi; one without either counts for nothing.
* Unlabelled images that hold a NaN or an infinity, or of which a model gives one, are left out; the
  means are over the others.
* Left out: in the code weights that changed by less than 5e-5 are not sent, psi below 5e-6 counts
  as 0 at evaluation, and a client divides its learning rate by 3 when its validation loss stops
  falling.

The learning rate must suit the lambdas: the L2 term alone moves psi by the fraction 2 lr lambda_l2
of its way to sigma in each step, all the way at lr = .05 with the default of 10, and diverges above
.1. The authors' is .001.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable

from tff_fedlabel import _validation, augmentation, pseudo_labels
from tff_fedlabel._autograph import as_written
from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _local_training, _method, _similar_clients, _turns, _views

CONSISTENCY_ON = ("all", "kept")


@dataclasses.dataclass(frozen=True)
class FedMatchConfig:
    """FedMatch's own parameters, with the names and values of the authors' code.

    Attributes:
      lambda_s: Weight >= 0 of the labelled loss.
      lambda_i: Weight >= 0 of the consistency with the helpers, lambda_ICCS in the paper.
      lambda_a: Weight >= 0 of the cross-entropy on pseudo-labels, lambda_ICCS in the paper.
      lambda_l2: Weight >= 0 of ||sigma - psi||^2.
      lambda_l1: Weight >= 0 of ||psi||_1.
      threshold: tau in [0, 1]; a pseudo-label is kept if the client's own largest probability is
        not smaller. The authors' code has .75.
      num_helpers: H, the number of helpers of a client, 0 for none.
      h_interval: Rounds between two refreshes of the helpers.
      helpers_at_refresh_only: Whether clients have helpers only in the rounds of a refresh, as in
        the authors' code.
      consistency_on: Whether the consistency with the helpers is on all unlabelled images (the
        paper) or on the kept ones (the authors' code).
      psi_factor: psi / sigma at the start, >= 0.
      strong_augment: RandAugment, a callable `(images, *, seed) -> images` on what the model takes,
        as float32 (images in [0, 1]), `seed` an int32 [2] derived from seed, round and step; None
        for the identity.
      seed: The seed of the augmentation's randomness and of the fixed image, a 32-bit int.

    Raises:
      ValueError: A field is out of its range or of the wrong type; the message names it.
    """

    lambda_s: float = 10.0
    lambda_i: float = 1e-2
    lambda_a: float = 1e-2
    lambda_l2: float = 10.0
    lambda_l1: float = 1e-4
    threshold: float = 0.85
    num_helpers: int = 2
    h_interval: int = 10
    helpers_at_refresh_only: bool = False
    consistency_on: str = "all"
    psi_factor: float = 0.2
    strong_augment: Callable[..., tf.Tensor] | None = augmentation.RandAugment()
    seed: int = 0

    def __post_init__(self):
        checked = {
            name: _validation.check_number(name, getattr(self, name))
            for name in ("lambda_s", "lambda_i", "lambda_a", "lambda_l2", "lambda_l1", "psi_factor")
        }
        checked["threshold"] = _validation.check_number("threshold", self.threshold, 0.0, 1.0)
        checked["num_helpers"] = _validation.check_int("num_helpers", self.num_helpers, 0, 1000)
        checked["h_interval"] = _validation.check_int("h_interval", self.h_interval, 1, 2**31 - 1)
        name = "helpers_at_refresh_only"
        checked[name] = _validation.check_flag(name, self.helpers_at_refresh_only)
        _validation.check_name("consistency_on", self.consistency_on, CONSISTENCY_ON)
        _validation.check_callable_or_none(
            "strong_augment", self.strong_augment, "tff_fedlabel.augmentation.RandAugment()"
        )
        checked["seed"] = _validation.check_seed(self.seed)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def client_update(setup: _method.Setup, client: _method.Client) -> _method.ClientOutput:
    """One client in one round of FedMatch, labels at client.

    r_k is the number of labelled and unlabelled images in the client's batches. The metrics are
    `labeled_loss` and `unlabeled_loss` (lambda_a CE + lambda_i KL; the terms on weights are not in
    it), `kept_fraction`, `agreement_fraction` (of helpers and images, where the helper predicts the
    client's class), `helpers_per_client`, `helper_bytes` (of all psi that went to clients as
    helpers) and, with `diagnose`, `pseudo_label_accuracy`.
    """
    psi = tuple(client.server_state["psi"])
    sigma = _minus(client.weights, psi)
    helper_psi, helper_count = _similar_clients.helpers(setup, client)
    helpers = _plus(sigma, helper_psi), helper_count
    trained = _turns.run_in_turns(
        setup,
        client.hparams,
        (
            ("labeled", functools.partial(_sigma_step, setup, client)),
            ("unlabeled", functools.partial(_psi_step, setup, client, helpers)),
        ),
        (sigma, psi),
        _local_training.pairs(client.labeled, client.unlabeled),
    )
    new_sigma, new_psi = trained.weights
    psi_delta = _minus(new_psi, psi)
    took_part = trained.num_examples > 0
    number = tf.cast(helper_count, tf.float32)
    metrics = collections.OrderedDict(
        trained.metrics,
        helpers_per_client=(number, tf.constant(1.0)),
        helper_bytes=(number * float(sum(w.shape.num_elements() * w.dtype.size for w in psi)),),
    )
    return _method.ClientOutput(
        delta=_plus(_minus(new_sigma, sigma), psi_delta),
        num_examples=trained.num_examples,
        model_metrics=trained.model_metrics,
        metrics=metrics,
        # For the plain mean of psi: a client without an image has changed nothing.
        sent=collections.OrderedDict(psi=psi_delta, clients=tf.cast(took_part, tf.float32)),
        memory=_similar_clients.remember(
            setup, client, new_psi, _plus(new_sigma, new_psi), took_part
        ),
    )


@as_written
def _sigma_step(setup, client, parts, batch, step_num):
    """Step 2 for one batch."""
    step = _local_training.labeled_step(setup, client)(_plus(*parts), batch, step_num)
    scale = setup.config.lambda_s
    return step._replace(gradients=tuple(tf.cast(scale, g.dtype) * g for g in step.gradients))


@as_written
def _psi_step(setup, client, helpers, parts, batch, step_num):
    """Step 3 for one batch."""
    config, images = setup.config, batch["x"]
    seed = augmentation.step_seed(config.seed, client.round_num, step_num)
    others, there = _answers(setup, client, helpers, images)
    sigma, psi = parts

    def on_rows(rows):
        """Which of these rows are usable, and gradients and sums over all of them."""
        shown, answers = _views.rows(images, rows), tf.gather(others, rows, axis=1)
        loss_and_labels = functools.partial(
            _psi_loss, setup, client, sigma, shown, answers, there, seed
        )
        (_, (loss, logits, labels, kept)), gradients = _local_training.differentiate(
            loss_and_labels, psi
        )
        number = tf.cast(tf.size(rows), tf.float32)
        agrees = tf.equal(tf.argmax(answers, axis=-1), tf.argmax(logits, axis=-1))
        agreements = tf.reduce_sum(there[:, tf.newaxis] * tf.cast(agrees, tf.float32))
        sums = number, loss * number, _views.count(kept), agreements
        if setup.diagnose:
            hidden = tf.reshape(tf.cast(tf.gather(batch["y"], rows), labels.dtype), [-1])
            sums = (*sums, _views.count(kept & tf.equal(labels, hidden)))
        return _views.usable(shown, logits), (gradients, sums)

    usable = _views.usable(images, tf.transpose(others, [1, 0, 2]))
    gradients, sums = _views.of_usable_rows(on_rows, tf.where(usable)[:, 0])
    number, loss, kept, agreements, *hits = sums
    metrics = collections.OrderedDict(
        unlabeled_loss=(loss, number),
        kept_fraction=(kept, tf.cast(_views.batch_size(images), tf.float32)),
        agreement_fraction=(agreements, tf.reduce_sum(there) * number),
    )
    if setup.diagnose:
        metrics["pseudo_label_accuracy"] = (*hits, kept)
    return _local_training.Step(gradients, number, metrics)


def _psi_loss(setup, client, sigma, images, others, there, seed, psi):
    """L_u(psi) of some images; and L_u without the terms on weights, logits, labels, mask."""
    config, theta = setup.config, _plus(sigma, psi)
    logits = _views.logits(setup, client, theta, images, training=True)
    classes = logits.shape[-1]
    own = tf.one_hot(tf.argmax(logits, axis=-1), classes)
    votes = tf.tensordot(there, tf.one_hot(tf.argmax(others, axis=-1), classes), 1)
    labels = tf.argmax(own + votes, axis=-1)
    kept = tf.reduce_max(tf.nn.softmax(logits), axis=-1) >= config.threshold

    def cross_entropy():
        rows = tf.where(kept)[:, 0]
        view = _views.augmented(config.strong_augment, _views.rows(images, rows), seed)
        view = tf.nest.map_structure(tf.stop_gradient, view)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.gather(labels, rows), _views.logits(setup, client, theta, view, training=True)
        )
        return tf.reduce_mean(losses)

    cross = tf.cond(tf.reduce_any(kept), cross_entropy, lambda: tf.constant(0.0))
    counts = kept if config.consistency_on == "kept" else tf.ones_like(kept)
    counts = there[:, tf.newaxis] * tf.cast(counts, tf.float32)
    divergence = counts * pseudo_labels.kl_divergence(others, logits[tf.newaxis])
    consistency = tf.math.divide_no_nan(tf.reduce_sum(divergence), tf.reduce_sum(counts))
    loss = config.lambda_a * cross + config.lambda_i * consistency
    return loss + _on_weights(config, sigma, psi), (loss, logits, labels, kept)


def _answers(setup, client, helpers, images):
    """The helpers' logits, float32 [H, b, classes], and which helpers there are, float32 [H].

    The rows of those that there are not are 0, and not computed.
    """
    (models, count), most = helpers, setup.config.num_helpers
    classes = client.memory["last"]["embedding"].shape[0]
    nobody = tf.zeros([most, _views.batch_size(images), classes])

    def answer(number, found):
        model = tuple(part[number] for part in models)
        logits = _views.logits(setup, client, model, images, training=False)
        return number + 1, tf.tensor_scatter_nd_update(found, [[number]], logits[tf.newaxis])

    found = nobody
    if most > 0:
        # A loop, not one copy of the model for each helper.
        _, found = tf.while_loop(lambda i, _: i < count, answer, (tf.constant(0), nobody))
    return found, tf.cast(tf.range(most) < count, tf.float32)


def _on_weights(config, sigma, psi):
    """lambda_l2 ||sigma - psi||^2 + lambda_l1 ||psi||_1; the subgradient of |0| is 0."""
    far = tf.add_n([tf.reduce_sum(tf.cast(tf.square(d), tf.float32)) for d in _minus(sigma, psi)])
    large = tf.add_n([tf.reduce_sum(tf.cast(tf.abs(p), tf.float32)) for p in psi])
    return config.lambda_l2 * far + config.lambda_l1 * large


def _plus(some, others):
    return tuple(tf.nest.map_structure(tf.add, tuple(some), tuple(others)))


def _minus(some, others):
    return tuple(tf.nest.map_structure(tf.subtract, tuple(some), tuple(others)))


def server_state(setup: _method.Setup) -> collections.OrderedDict:
    """psi at the start, `psi_factor` times sigma."""
    share = setup.config.psi_factor / (1.0 + setup.config.psi_factor)
    weights = [tf.convert_to_tensor(w) for w in setup.model.initial_weights[0]]
    return collections.OrderedDict(psi=tuple(tf.cast(share, w.dtype) * w for w in weights))


def server_update(setup: _method.Setup, state, sent) -> collections.OrderedDict:
    """The plain mean of psi over the clients that took part."""
    del setup
    means = [tf.math.divide_no_nan(d, tf.cast(sent["clients"], d.dtype)) for d in sent["psi"]]
    return collections.OrderedDict(psi=_plus(state["psi"], means))


def advice(config: FedMatchConfig, rounds: int) -> str | None:
    """Says so if the run ends before its first helpers."""
    first = max(config.h_interval, 2)  # In the first round nobody has taken part before.
    if config.num_helpers == 0 or rounds >= first:
        return None
    return (
        f"fedmatch has helpers from round {first} on (h_interval {config.h_interval}), and this "
        f"run ends after {rounds}: it goes without."
    )


METHOD = _method.Method(
    "fedmatch",
    FedMatchConfig,
    client_update,
    server_state=server_state,
    server_update=server_update,
    initial_memory=_similar_clients.initial_memory,
    choose_helpers=_similar_clients.choose_helpers,
    advice=advice,
    uniform_mean=True,
)
