"""Rounds of methods whose steps take a labelled and an unlabelled batch, and float64 NumPy's."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from fedlabel_rounds import run
from linear_model import build_model, initial_weights, random_client
from numpy_reference import CLASSES, flat, softmax
from weights import assert_weights_close

from tff_fedlabel import algorithms

sgd = tff.learning.optimizers.build_sgdm

# As many batches of either kind, more of one, none of one, none at all.
COHORT = [
    random_client(1, 11, 9),
    random_client(2, 3, 14),
    random_client(3, 14, 5),
    random_client(4, 0, 9),
    random_client(5, 8, 0),
    random_client(6, 0, 0),
]
TWO_ROUNDS = [COHORT, [random_client(7), random_client(8, 5, 20)]]


@dataclasses.dataclass
class Reference:
    """A method on a linear softmax model. Field names as in the configurations.

    Attributes:
      passes: Of the probabilities of the weak view, whether the image counts.
      target: Of the logits of the weak view, the probabilities t that the strong view's p is drawn
        to: the gradient of CE(t, p), and of KL(t || p), by the logits is p - t.
      distance: Of t and p, the loss.
      keep: Of the round and the probability of the label, whether a labelled image counts.
      weak, weak_labeled, strong: Views of images, by round and step.
    """

    passes: Callable
    target: Callable
    distance: Callable
    keep: Callable = lambda round_num, right: True
    unlabeled_weight: float = 1.0
    proximal_strength: float = 0.0
    include_labeled: bool = True
    weak: Callable = lambda x, *when: x
    weak_labeled: Callable | None = None
    strong: Callable = lambda x, *when: x
    lr: float = 0.3
    counts: dict = dataclasses.field(default_factory=dict)

    def client(self, received, labeled, unlabeled, round_num=0):
        """Returns delta_k and r_k; adds to `counts` what happened."""
        w = [a.copy() for a in received]
        used = 0
        hidden = iter(hidden_labels(sum(map(len, unlabeled))))
        for step in range(max(len(labeled), len(unlabeled))):
            gradients = [self.proximal_strength * (a - b) for a, b in zip(w, received, strict=True)]
            x, y = labeled[step] if step < len(labeled) else (np.zeros((0, 2, 2, 1)), [])
            u = unlabeled[step] if step < len(unlabeled) else np.zeros((0, 2, 2, 1))

            errors, features, took_part = [], [], [False] * len(x)
            view = (self.weak_labeled or self.weak)(x, round_num, step)
            for i, (image, label) in enumerate(zip(view, y, strict=True)):
                f = flat(image[None])[0]
                p = softmax(f @ w[0] + w[1])
                if self.keep(round_num, p[label]):
                    took_part[i] = True
                    features.append(f)
                    errors.append(p - np.eye(CLASSES)[label])
                    self.add("labeled_loss", -np.log(p[label]), 1)
            self.add("labeled_steps", 0, len(x) > 0)
            for f, e in zip(features, errors, strict=True):
                gradients[0] = gradients[0] + np.outer(f, e) / len(errors)
                gradients[1] = gradients[1] + e / len(errors)

            both = np.concatenate([x, u]) if self.include_labeled else u
            first = len(both) - len(u)
            weak, strong = (v(both, round_num, step) for v in (self.weak, self.strong))
            for i in range(len(both)):
                z = flat(weak[i : i + 1])[0] @ w[0] + w[1]
                passed = self.passes(softmax(z).max())
                if i >= first:
                    self.add("kept_fraction", passed, 1)
                    right = np.argmax(z) == next(hidden)
                    self.add("pseudo_label_accuracy", passed and right, passed)
                self.add("unlabeled_loss", 0, 1)
                if not passed:
                    continue
                f = flat(strong[i : i + 1])[0]
                p, t = softmax(f @ w[0] + w[1]), self.target(z)
                self.add("unlabeled_loss", self.distance(t, p), 0)
                share = self.unlabeled_weight / len(both)
                gradients[0] = gradients[0] + share * np.outer(f, p - t)
                gradients[1] = gradients[1] + share * (p - t)
                if i < first:
                    took_part[i] = True
                else:
                    used += 1
            used += sum(took_part)
            w = [a - self.lr * g for a, g in zip(w, gradients, strict=True)]
        return [a - b for a, b in zip(w, received, strict=True)], used

    def add(self, name, value, number):
        total = self.counts.setdefault(name, np.zeros(2))
        total += [value, number]

    def rounds(self, cohorts, weights):
        """Weights after all rounds, and the sum of r_k of the last."""
        for round_num, cohort in enumerate(cohorts):
            self.counts = {}
            outputs = [self.client(weights, *client, round_num) for client in cohort]
            total = sum(r for _, r in outputs)
            weights = [w + sum(r * d[i] for d, r in outputs) / total for i, w in enumerate(weights)]
        return weights, total

    def metrics(self):
        return {name: total / number for name, (total, number) in self.counts.items() if number}


def strict_model(metrics_fns=None):
    """The linear model; it refuses a batch of 0 images, and counts labelled batches if told to."""
    model = build_model(initial_weights())

    @tf.function
    def predict(weights, x, training=True):
        tf.debugging.assert_positive(tf.shape(x)[0])
        return model.predict_on_batch(weights, x, training=training)

    more = {} if metrics_fns is None else {"metrics_fns": metrics_fns}
    return tff.learning.models.FunctionalModel(
        initial_weights=model.initial_weights,
        predict_on_batch_fn=predict,
        loss_fn=model.loss,
        input_spec=model.input_spec,
        **more,
    )


def negative(images, *, seed):
    del seed
    tf.debugging.assert_positive(tf.shape(images)[0])
    return 1.0 - images


def rolled(images, *, seed):
    del seed
    tf.debugging.assert_positive(tf.shape(images)[0])
    return tf.roll(images, 1, axis=2)


# What NumPy makes of the two.
VIEWS = {"strong": lambda x, *when: 1.0 - x, "weak": lambda x, *when: np.roll(x, 1, axis=2)}


def hidden_labels(n):
    """Of a client's n unlabelled images."""
    return np.arange(n) % CLASSES


def start():
    """The first weights as float32 has them, in float64."""
    return [np.float64(np.float32(w)) for w in initial_weights()]


@functools.cache
def _build(name, config, tail):
    method = algorithms.METHODS[name]
    made = method.config_class(**dict(config))
    return method(strict_model(), sgd(0.3), made, **dict(tail))


def build(name, tail=None, **config):
    """A process with both views changed; one that was built, and compiled, serves again."""
    config = {"strong_augment": negative, "weak_augment": rolled, **config}
    return _build(name, tuple(config.items()), tuple((tail or {}).items()))


def check_rounds(reference, process, cohorts=TWO_ROUNDS):
    """Compares weights, r_k and metrics; returns the metrics."""
    expected, used = reference.rounds(cohorts, start())
    actual, metrics = run(process, cohorts, hidden_labels if _diagnoses(process) else None)
    assert_weights_close(actual, expected)
    assert metrics["images_used"] == used
    assert metrics["rejected_clients"] == 0.0
    for name, value in reference.metrics().items():
        if name in metrics:
            np.testing.assert_allclose(metrics[name], value, atol=1e-4, err_msg=name)
    # The reference itself moved, or the comparison would say nothing.
    assert max(np.abs(e - w).max() for e, w in zip(expected, start(), strict=True)) > 1e-2
    return metrics


def _diagnoses(process):
    """Whether unlabelled elements have a hidden label."""
    return "y" in dir(process.next.type_signature.parameter[1].member["unlabeled"].element)


def check_hidden_labels(plain_process, process):
    """Two sets of hidden labels: the same weights to the bit, another accuracy."""
    rng = np.random.default_rng(0)
    plain, plain_metrics = run(plain_process, TWO_ROUNDS)
    first, first_metrics = run(process, TWO_ROUNDS, np.zeros)
    other, other_metrics = run(process, TWO_ROUNDS, lambda n: rng.integers(CLASSES, size=n))
    for a, b, c in zip(plain, first, other, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    assert first_metrics["pseudo_label_accuracy"] != other_metrics["pseudo_label_accuracy"]
    assert "pseudo_label_accuracy" not in plain_metrics


def check_broken_clients(process):
    """A client with a NaN among its labelled images counts for nothing."""
    broken = random_client(11)
    broken[0][0][0][0, 0, 0, 0] = np.nan
    expected, expected_metrics = run(process, [COHORT], hidden_labels)
    actual, metrics = run(process, [[broken, *COHORT]], hidden_labels)
    assert_weights_close(actual, expected, atol=1e-6)
    assert metrics["rejected_clients"] == 1.0
    assert metrics["images_used"] == expected_metrics["images_used"]
    assert np.isfinite(metrics["labeled_loss"])


def spoiled_cohort():
    """The first cohort with a NaN in an unlabelled image of the first client."""
    (labeled, unlabeled), *others = COHORT
    unlabeled = [u.copy() for u in unlabeled]
    unlabeled[0][2] = np.nan
    return [(labeled, unlabeled), *others]


def shifted(factor):
    """An augmentation that adds what depends on the seed."""

    def augment(images, *, seed):
        return images + tf.cast(seed[0] % 7 - seed[1] % 5, tf.float32) / factor

    return augment


def check_seeds(reference, process, seed):
    """Each kind of view has a seed of its own, made of seed, round and step."""
    from tff_fedlabel.augmentation import step_seed

    seen = []

    def view(bits, factor):
        def shift(x, round_num, step):
            a, b = np.asarray(step_seed(seed, round_num, step)) ^ np.int32(bits)
            seen.append((a % 7 - b % 5, factor))
            return x + (a % 7 - b % 5) / factor

        return shift

    reference = dataclasses.replace(
        reference,
        strong=view((0, 0), 50),
        weak=view((0, -1), 40),
        weak_labeled=view((-1, 0), 40),
    )
    check_rounds(reference, process)
    assert len(set(seen)) > 6
