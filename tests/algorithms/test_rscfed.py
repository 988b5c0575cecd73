"""Whole RSCFed rounds through TFF against float64 NumPy, written from the paper's formulas.

Random draws are taken from the same stateless operations of TensorFlow.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client
from numpy_reference import CLASSES, flat, softmax
from test_contract import train
from weights import TOLERANCE, assert_weights_close, assert_weights_equal

from tff_fedlabel import algorithms
from tff_fedlabel.algorithms import RSCFedConfig, build_rscfed, rscfed
from tff_fedlabel.augmentation import step_seed

pytestmark = pytest.mark.usefixtures("device_runtime")
MIXED, UNLABELED, LABELED = random_client(1), random_client(2, 0, 9), random_client(3, 8, 0)
OTHER, NOTHING = random_client(4, 0, 22), random_client(5, 0, 0)
# One with an unlabelled image that is left out, one that is left out itself.
SPOILED, BROKEN = random_client(6, 0, 6), random_client(7, 6, 6)
SPOILED[1][0][0] = np.nan
BROKEN[0][0][0][0] = np.nan
# (client number, client); in the third round clients come back to their teachers.
ROUNDS = [
    [(0, MIXED), (1, UNLABELED), (2, LABELED), (3, OTHER), (4, NOTHING)],
    [(3, OTHER), (1, UNLABELED), (5, BROKEN), (6, SPOILED)],
    [(1, UNLABELED), (0, MIXED), (3, OTHER)],
]


def shift(seed):
    seed = np.asarray(seed)
    return (seed[0] % 7 - seed[1] % 5) / 50


def weak(images, *, seed):
    return images + tf.cast(seed[0] % 7 - seed[1] % 5, tf.float32) / 50


# Scales at which the distances matter for images and weights so small.
BASE = {
    "group_size": 2,
    "distance_scale": 40.0,
    "labeled_distance_scale": 5.0,
    "unlabeled_weight": 2.0,
    "weak_augment": weak,
    "seed": 4,
}


@functools.cache
def _build(config, options):
    return build_rscfed(
        build_model(initial_weights()),
        tff.learning.optimizers.build_sgdm(0.3),
        config,
        **dict(options),
    )


def build(options=(), **config):
    return _build(RSCFedConfig(**{**BASE, **config}), tuple(options))


class RSCFed:
    """The method in NumPy."""

    def __init__(self, uniform=False, **config):
        self.config = RSCFedConfig(**{**BASE, **config})
        self.uniform = uniform
        self.weights = [np.float64(np.float32(w)) for w in initial_weights()]
        self.memory = {}
        self.round_num = 0

    def step(self, weights, gradients, factor=1.0):
        limit = self.config.max_gradient_norm
        if limit is not None:
            norm = np.sqrt(sum((g**2).sum() for g in gradients))
            gradients = [g * min(1.0, limit / norm) for g in gradients]
        return [w - 0.3 * factor * g for w, g in zip(weights, gradients, strict=True)]

    def client(self, number, labeled, unlabeled):
        """(update, images, whether it has labels)."""
        config, weights = self.config, self.weights
        for x, y in labeled:
            error = (softmax(flat(x) @ weights[0] + weights[1]) - np.eye(CLASSES)[y]) / len(y)
            weights = self.step(weights, [flat(x).T @ error, error.sum(axis=0)])
        teacher, steps = self.memory.get(number, (self.weights, 0))
        unlabeled = [x[np.isfinite(x).all(axis=(1, 2, 3))] for x in unlabeled]
        for step, x in enumerate(unlabeled):
            first, second = (
                flat(x) + shift(step_seed(config.seed, self.round_num, 2 * step + i))
                for i in range(2)
            )
            p = softmax(first @ teacher[0] + teacher[1]) ** (1 / config.sharpening_temperature)
            target = p / p.sum(axis=1, keepdims=True)
            q = softmax(second @ weights[0] + weights[1])
            # d/dz_j of sum_c (q_c - t_c)^2
            off = q - target
            error = 2 * q * (off - (q * off).sum(axis=1, keepdims=True))
            error *= config.unlabeled_weight / len(x)
            gradients = [second.T @ error, error.sum(axis=0)]
            weights = self.step(weights, gradients, config.unlabeled_lr_factor)
            decay = min(1 - 1 / (steps + 1), config.ema_decay)
            teacher = [decay * t + (1 - decay) * w for t, w in zip(teacher, weights, strict=True)]
            steps += 1
        images = sum(len(y) for _, y in labeled) + sum(map(len, unlabeled))
        if not all(np.isfinite(w).all() for w in weights):
            return None, 0, False
        if steps:
            self.memory[number] = teacher, steps
        update = [w - w0 for w, w0 in zip(weights, self.weights, strict=True)]
        return update, images, bool(labeled)

    def consensus(self, members):
        n = np.array([1.0 if self.uniform else images for _, images, _ in members])
        plain = [sum(s * u[i] for s, (u, _, _) in zip(n / n.sum(), members, strict=True)) for i in range(2)]  # fmt: skip  # noqa: E501
        has_labels = np.array([labeled for _, _, labeled in members])
        beta = self.config.labeled_distance_scale if has_labels.any() else self.config.distance_scale  # fmt: skip  # noqa: E501
        share = n / n.sum()
        for k, (update, images, labeled) in enumerate(members):
            squares = [((u - m) ** 2).sum() for u, m in zip(update, plain, strict=True)]
            whole = self.config.distance == "whole"
            distance = np.sqrt(sum(squares)) if whole else np.sqrt(squares).sum()
            share[k] *= np.exp(-beta * distance / images)
            share[k] *= self.config.labeled_factor if labeled else 1.0
        self.shares.append(share / share.sum())
        parts = zip(share / share.sum(), members, strict=True)
        return [sum(s * u for s, u in column) for column in zip(*([(s, part) for part in u] for s, (u, _, _) in parts), strict=True)]  # fmt: skip  # noqa: E501

    def next(self, cohort):
        config, self.shares = self.config, []
        outputs = [self.client(number, *client) for number, client in cohort]
        able = [k for k, (_, images, _) in enumerate(outputs) if images]
        seed = step_seed(config.seed, self.round_num, 0)
        draws = tf.random.stateless_uniform([config.num_groups, len(cohort)], seed).numpy()
        self.round_num += 1
        if not able:
            return
        updates = []
        for draw in draws:
            group = sorted(able, key=lambda k: -draw[k])[: config.group_size]
            updates.append(self.consensus([outputs[k] for k in group]))
        self.weights = [
            w + sum(u[i] for u in updates) / config.num_groups for i, w in enumerate(self.weights)
        ]


UNIFORM = ("client_weighting", tff.learning.ClientWeighting.UNIFORM)
REDUCE = ("loop_implementation", tff.learning.LoopImplementation.DATASET_REDUCE)


# A process takes seconds to build and compile, so what does not depend on each other shares one.
@pytest.mark.parametrize(
    "config,options",
    [
        ({}, ()),
        ({"group_size": 5}, ()),
        (
            {"num_groups": 1, "group_size": 3, "distance": "by_tensor", "labeled_factor": 6},
            (UNIFORM,),
        ),
        ({"max_gradient_norm": 0.2, "sharpening_temperature": 0.8, "ema_decay": 0.6}, ()),
    ],
    ids=str,
)
def test_rounds_equal_numpy(config, options):
    reference = numpy_rounds(uniform=UNIFORM in options, **config)
    for name in [*config, *["uniform"] * len(options)]:
        others = {"uniform": UNIFORM in options, **config}
        del others[name]
        pairs = zip(numpy_rounds(**others).weights, reference.weights, strict=True)
        assert (
            max(np.abs(a - b).max() for a, b in pairs) > 10 * TOLERANCE
        ), f"{name} would not be missed"
    process = build(options, **config)
    actual, history, memory = train(process, rscfed.METHOD, ROUNDS)
    assert_weights_close(actual, reference.weights)
    for number, (teacher, steps) in reference.memory.items():
        assert memory[number]["steps"] == steps
        assert_weights_close(memory[number]["teacher"], teacher)
    assert memory[4]["steps"] == memory[5]["steps"] == 0  # Nothing, and an update that was NaN.
    assert memory[6]["steps"] == 2
    assert history[1]["train"]["kept_fraction"] == pytest.approx((9 + 22 + 5) / (9 + 22 + 6))
    assert [float(h["train"]["rejected_clients"]) for h in history] == [0.0, 1.0, 0.0]
    # The weights are not those of FedAvg: the distances count.
    shares = np.array(reference.shares)
    assert np.ptp(shares) > 0.1


def numpy_rounds(uniform=False, **config):
    reference = RSCFed(uniform, **config)
    for cohort in ROUNDS:
        reference.next(cohort)
    return reference


def test_weights_so_far_apart_that_all_of_them_vanish():
    """exp(-beta ...) is 0 for the whole group; the nearest client is left.

    In the other loop, each round of which takes long.
    """
    cohort = [(0, MIXED), (3, OTHER)]
    process = build([REDUCE], group_size=2, num_groups=1, labeled_distance_scale=1e9)
    weights, _, _ = train(process, rscfed.METHOD, [cohort])
    reference = RSCFed()
    outputs = [reference.client(number, *client) for number, client in cohort]
    # Both are as far from their mean as the other's size is; distance / n decides.
    n = np.array([images for _, images, _ in outputs], float)
    nearest = np.argmin(n[::-1] / n)
    expected = [w + u for w, u in zip(reference.weights, outputs[nearest][0], strict=True)]
    assert_weights_close(weights, expected)


def test_groups_are_random_and_have_no_client_twice():
    config, able = RSCFedConfig(num_groups=50, group_size=3), np.arange(8) != 2
    first, again, other = (rscfed.draw_groups(config, able, r).numpy() for r in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first.sum(axis=1) == 3).all() and not first[:, 2].any()
    # 50 x 3 / 7 = 21 times each.
    assert (first.sum(axis=0)[able] > 8).all()
    few = np.array([True, False, True, False])
    assert (rscfed.draw_groups(config, few, 0).numpy() == few).all()


def test_many_groups_are_no_larger_graph():
    """And their mean is that of NumPy, over more groups than are added up at once."""
    rng = np.random.default_rng(3)
    delta = tuple(rng.normal(size=(4, *shape)).astype(np.float32) for shape in ((2, 3), (3,)))
    images = np.float32([3, 0, 5, 7])
    clients = algorithms.Clients(
        delta, images, {"images": images, "labeled": np.float32([0, 0, 1, 0])}, np.int32(2)
    )

    def built(num_groups):
        config = RSCFedConfig(**{**BASE, "num_groups": num_groups})
        setup = algorithms.Setup(None, None, config)
        make = tf.function(lambda: rscfed.aggregate(setup, tf.nest.map_structure(tf.constant, clients)))  # fmt: skip  # noqa: E501
        return config, make.get_concrete_function()

    def operations(function):
        graph = function.graph.as_graph_def()
        return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)

    (config, few), (_, many) = built(20), built(1000)
    assert operations(few) == operations(many)
    expected = RSCFed()
    expected.shares = []
    groups = rscfed.draw_groups(config, images > 0, 2).numpy()
    assert len(set(map(tuple, groups))) > 1
    members = [
        [([d[k] for d in delta], images[k], k == 2) for k in np.flatnonzero(g)] for g in groups
    ]
    parts = [expected.consensus(group) for group in members]
    for i, found in enumerate(few()):
        np.testing.assert_allclose(found, np.mean([p[i] for p in parts], axis=0), atol=2e-5)


def test_hidden_labels_cannot_change_the_update():
    rng = np.random.default_rng(0)
    process = build([("diagnose", True)])
    plain, _, _ = train(build(), rscfed.METHOD, ROUNDS)
    accuracies = []
    for hidden in (np.zeros, lambda n: rng.integers(CLASSES, size=n)):
        weights, history, _ = train(process, rscfed.METHOD, ROUNDS, hidden)
        assert_weights_equal(weights, plain)
        accuracies.append(float(history[0]["train"]["pseudo_label_accuracy"]))
    assert accuracies[0] != accuracies[1]
    assert history[0]["train"]["kept_fraction"] == 1.0


def test_the_defaults_are_the_papers():
    config, method = RSCFedConfig(), rscfed.METHOD
    assert (config.num_groups, config.group_size) == (3, 5)
    assert (config.distance_scale, config.labeled_distance_scale) == (1e4, 100.0)
    assert (config.unlabeled_weight, config.sharpening_temperature) == (0.02, 0.5)
    assert config.ema_decay == 0.999 and config.unlabeled_lr_factor == pytest.approx(0.021 / 0.03)
    assert method.labels_at == ("some_clients", "every_client")


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_groups", 0),
        ("group_size", 0),
        ("distance_scale", -1.0),
        ("labeled_distance_scale", -1.0),
        ("labeled_factor", 0.0),
        ("distance", "far"),
        ("unlabeled_weight", -1.0),
        ("sharpening_temperature", 0.0),
        ("sharpening_temperature", 1e-38),
        ("ema_decay", 1.5),
        ("unlabeled_lr_factor", 0.0),
        ("max_gradient_norm", 0.0),
        ("weak_augment", 3),
        ("seed", -1),
    ],
)
def test_wrong_values_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        RSCFedConfig(**{field: value})
