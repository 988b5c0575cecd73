"""Whole SemiFL rounds through TFF against float64 NumPy, written from the paper's formulas.

Random draws are taken from the same stateless operations of TensorFlow.
"""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client, to_tff
from numpy_reference import CLASSES, SHAPE, Reference, flat, softmax
from weights import assert_weights_close, assert_weights_equal

from tff_fedlabel import algorithms
from tff_fedlabel.algorithms import (
    MethodError,
    SemiFLConfig,
    ServerOutput,
    build_semifl,
    semifl,
    supervised,
)
from tff_fedlabel.augmentation import step_seed

pytestmark = pytest.mark.usefixtures("device_runtime")
SERVER = dict(zip("xy", (np.concatenate(part) for part in zip(*random_client(9, 7, 0)[0])), strict=True))  # fmt: skip  # noqa: B905, E501
DULL = ([], [np.zeros((3, *SHAPE), np.float32)])  # Of such images the model is not sure.
COHORT = [random_client(1), random_client(2, 0, 9), DULL, random_client(3, 8, 0)]
TWO_ROUNDS = [COHORT, [DULL, random_client(4, 5, 22)]]


def weak(images, *, seed):
    del seed
    return 0.9 * images + 0.05


def strong(images, *, seed):
    del seed
    return 1.0 - images


BASE = {
    "threshold": 0.6,
    "server_epochs": 2,
    "server_batch_size": 3,
    "strong_augment": strong,
    "weak_augment": weak,
    "seed": 5,
}


@functools.cache
def _build(config, diagnose, loop):
    return build_semifl(
        build_model(initial_weights()),
        tff.learning.optimizers.build_sgdm(0.3),
        config,
        server_data=SERVER,
        diagnose=diagnose,
        loop_implementation=loop,
    )


def build(diagnose=False, loop=tff.learning.LoopImplementation.DATASET_ITERATOR, **config):
    return _build(SemiFLConfig(**{**BASE, **config}), diagnose, loop)


def run(process, cohorts, hidden=None):
    state, history = process.initialize(), []
    for cohort in cohorts:
        output = process.next(state, [to_tff(client, hidden) for client in cohort])
        state = output.state
        history.append(output.metrics)
    return [np.asarray(w) for w in process.get_model_weights(state).trainable], history


class SemiFL:
    """The method in NumPy; what it counted in the last round is in its attributes."""

    def __init__(self, **config):
        self.config = SemiFLConfig(**{**BASE, **config})
        self.weights = [np.float64(np.float32(w)) for w in initial_weights()]
        self.velocity = [0.0, 0.0]
        self.round_num = 0

    def seed(self, step, what):
        return step_seed(self.config.seed, self.round_num, 3 * (step + 1) + what)

    def predict(self, weights, x):
        return softmax(flat(x) @ weights[0] + weights[1])

    def step(self, weights, terms):
        """A step on the sum of `factor * mean CE(x, y)`; returns weights and the loss."""
        gradients, loss = [0.0, 0.0], 0.0
        for factor, x, y in terms:
            p = self.predict(weights, x)
            loss += factor * -np.log(p[np.arange(len(y)), y]).mean()
            error = factor * (p - np.eye(CLASSES)[y]) / len(y)
            gradients = [gradients[0] + flat(x).T @ error, gradients[1] + error.sum(axis=0)]
        if self.config.max_gradient_norm is not None:
            norm = np.sqrt(sum((g**2).sum() for g in gradients))
            self.clipped |= norm > self.config.max_gradient_norm
            gradients = [g * min(1.0, self.config.max_gradient_norm / norm) for g in gradients]
        return [w - 0.3 * g for w, g in zip(weights, gradients, strict=True)], loss

    def client(self, batches):
        config, weights = self.config, self.weights
        if not batches:
            return None
        x = np.concatenate(batches).astype(np.float64)
        p = self.predict(weights, 0.9 * x + 0.05)
        labels, kept = p.argmax(axis=1), np.flatnonzero(p.max(axis=1) >= config.threshold)
        usable = np.flatnonzero(np.isfinite(x).all(axis=(1, 2, 3)))
        self.images += len(x)
        self.kept += len(kept)
        size = max(len(batch) for batch in batches)
        for step, start in enumerate(range(0, len(kept), size)):
            rows = kept[start : start + size]
            partners = np.asarray(
                tf.random.stateless_uniform(
                    [len(rows)], self.seed(step, 2), maxval=len(usable), dtype=tf.int64
                )
            )
            partners = usable[partners]
            gammas = np.asarray(
                tf.random.stateless_gamma([2], self.seed(step, 1), config.mixup_alpha), np.float64
            )
            share = gammas[0] / gammas.sum()
            views = 0.9 * x + 0.05
            mixed = share * views[rows] + (1 - share) * views[partners]
            factor = config.mixup_weight
            terms = [
                (1.0, 1.0 - views[rows], labels[rows]),
                (factor * share, mixed, labels[rows]),
                (factor * (1 - share), mixed, labels[partners]),
            ]
            weights, loss = self.step(weights, terms)
            self.loss += loss * len(rows)
        return weights if len(kept) else None

    def next(self, cohort):
        self.images = self.kept = self.loss = 0
        self.clipped = False
        trained = [t for t in (self.client(unlabeled) for _, unlabeled in cohort) if t is not None]
        if trained:
            for i, w in enumerate(self.weights):
                mean = np.mean([t[i] - w for t in trained], axis=0)
                self.velocity[i] = 0.5 * self.velocity[i] + mean
            self.weights = [w + v for w, v in zip(self.weights, self.velocity, strict=True)]
        self.server_loss = 0.0
        for epoch in range(self.config.server_epochs):
            seed = step_seed(self.config.seed, self.round_num, epoch)
            order = np.asarray(tf.random.experimental.stateless_shuffle(tf.range(7), seed))
            for start in range(0, 7, self.config.server_batch_size):
                rows = order[start : start + self.config.server_batch_size]
                terms = [(1.0, 0.9 * SERVER["x"][rows] + 0.05, SERVER["y"][rows])]
                self.weights, loss = self.step(self.weights, terms)
                self.server_loss += loss * len(rows) / (7 * self.config.server_epochs)
        self.round_num += 1


def check(cohorts, loop=tff.learning.LoopImplementation.DATASET_ITERATOR, **config):
    reference = SemiFL(**config)
    for cohort in cohorts:
        reference.next(cohort)
    actual, history = run(build(loop=loop, **config), cohorts)
    assert_weights_close(actual, reference.weights)
    train = history[-1]["client_work"]["train"]
    assert train["images_used"] == reference.kept
    assert 0 < train["kept_fraction"] < 1
    assert train["kept_fraction"] == pytest.approx(reference.kept / reference.images)
    assert train["unlabeled_loss"] == pytest.approx(reference.loss / reference.kept, abs=2e-5)
    of_server = history[-1]["finalizer"]["server_training"]
    assert of_server["labeled_loss"] == pytest.approx(reference.server_loss, abs=2e-5)
    assert "labeled_loss" not in train
    return reference


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"mixup_weight": 0.0, "server_batch_size": 250},
        {"mixup_weight": 0.4, "mixup_alpha": 3.0, "max_gradient_norm": 0.5},
    ],
    ids=str,
)
def test_rounds_equal_numpy(config):
    reference = check(TWO_ROUNDS, **config)
    assert reference.clipped == ("max_gradient_norm" in config)


def test_the_other_loop_gives_the_same():
    check(TWO_ROUNDS, loop=tff.learning.LoopImplementation.DATASET_REDUCE)


def test_clients_that_have_nothing_to_say_leave_the_training_to_the_server():
    """Nothing passes, no unlabelled images, nothing at all: r_k is 0; labels are not read."""
    reference = SemiFL()
    cohort = [DULL, random_client(3, 8, 0), random_client(6, 0, 0)]
    reference.next(cohort)
    actual, history = run(build(), [cohort])
    assert_weights_close(actual, reference.weights)
    assert history[0]["client_work"]["train"]["images_used"] == 0.0
    # Unlike in other methods, that is not the end of the round.
    assert np.abs(actual[0] - np.float32(initial_weights()[0])).max() > 1e-2


def test_images_with_a_nan_are_neither_kept_nor_mixed():
    broken = random_client(7, 0, 14)
    for batch in broken[1]:
        batch[1:] = np.nan
    reference = check([[COHORT[0], broken, COHORT[1]]])
    # The client has images that are kept, and so others would be mixed with them.
    alone = SemiFL()
    alone.next([broken])
    assert 0 < alone.kept < reference.kept


def test_many_passes_of_the_server_are_no_larger_graph():
    setup = algorithms.Setup(
        build_model(initial_weights()),
        tff.learning.optimizers.build_sgdm(0.3),
        None,
        tff.learning.LoopImplementation.DATASET_ITERATOR,
    )

    def operations(server_epochs):
        config = SemiFLConfig(**{**BASE, "server_epochs": server_epochs})

        @tf.function
        def train():
            weights = tuple(map(tf.constant, setup.model.initial_weights[0]))
            data = {name: tf.constant(part) for name, part in SERVER.items()}
            hparams = setup.optimizer.get_hparams(setup.optimizer.initialize(weights))
            server = algorithms.Server(weights, (), data, tf.constant(0), hparams)
            return semifl.server_training(setup._replace(config=config), server).weights

        graph = train.get_concrete_function().graph.as_graph_def()
        return sum(len(f.node_def) for f in graph.library.function)

    assert operations(10**6) == operations(2)


def test_hidden_labels_cannot_change_the_update():
    rng = np.random.default_rng(0)
    process = build(diagnose=True)
    found = [
        run(process, TWO_ROUNDS, hidden)
        for hidden in (np.zeros, lambda n: rng.integers(CLASSES, size=n))
    ]
    plain, _ = run(build(), TWO_ROUNDS)
    for weights, _ in found:
        assert_weights_equal(weights, plain)
    accuracies = [
        history[0]["client_work"]["train"]["pseudo_label_accuracy"] for _, history in found
    ]
    reference = SemiFL()
    kept = zeros = 0
    for _, batches in COHORT:
        for x in batches:
            p = reference.predict(reference.weights, 0.9 * x.astype(np.float64) + 0.05)
            kept += (p.max(axis=1) >= 0.6).sum()
            zeros += ((p.max(axis=1) >= 0.6) & (p.argmax(axis=1) == 0)).sum()
    assert accuracies[0] == pytest.approx(zeros / kept)
    assert accuracies[0] != accuracies[1]


def test_labels_at_clients_cannot_change_the_update():
    without = [([], unlabeled) for _, unlabeled in COHORT]
    assert_weights_equal(run(build(), [COHORT])[0], run(build(), [without])[0])


def test_lambda_is_beta_distributed():
    draws = np.array([semifl.draw_lambda(0.75, [seed, 1]) for seed in range(800)])
    assert ((draws >= 0) & (draws <= 1)).all()
    assert abs(draws.mean() - 0.5) < 0.05
    # Beta(a, a) has variance 1 / (4 (2 a + 1)).
    assert abs(draws.var() - 0.1) < 0.015


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"metrics": {"loss": (1.0,)}},
            "metric 'loss' of server_training of own must have",
        ),
        ({"metrics": {"far": 1.0}}, "metric 'far' of server_training of own must be"),
        (
            {"model_metrics": {"far": 1.0}},
            "model_metrics of server_training of own must have the structure",
        ),
        ({"weights": ()}, "server_training of own"),
    ],
)
def test_what_the_server_gives_is_checked(fields, words):
    def server_training(setup, server):
        del setup
        return ServerOutput(server.weights, {})._replace(**fields)

    own = dataclasses.replace(supervised.FEDAVG, name="own", server_training=server_training)
    with pytest.raises(MethodError, match=f"^{words}"):
        sgd = tff.learning.optimizers.build_sgdm(0.1)
        own(build_model(initial_weights()), sgd, server_data=SERVER)


def test_the_defaults_are_the_authors():
    config, method = SemiFLConfig(), semifl.METHOD
    assert (config.threshold, config.mixup_alpha, config.mixup_weight) == (0.95, 0.75, 1.0)
    assert (config.server_epochs, config.server_batch_size) == (5, 250)
    assert (method.uniform_mean, method.server_momentum, method.labels_at) == (
        True,
        0.5,
        ("server",),
    )
    assert Reference().lr == 0.3


@pytest.mark.parametrize(
    "field, value",
    [
        ("threshold", 1.5),
        ("mixup_alpha", 0.0),
        ("mixup_weight", -1.0),
        ("server_epochs", 0),
        ("server_batch_size", 0),
        ("max_gradient_norm", 0.0),
        ("strong_augment", 3),
        ("weak_augment", "flip"),
        ("seed", -1),
    ],
)
def test_wrong_values_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        SemiFLConfig(**{field: value})
