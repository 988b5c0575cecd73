"""What a method says about the server and the weighting, and batches of both kinds side by side."""

import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client, to_tff
from numpy_reference import Reference
from weights import assert_weights_close

from tff_fedlabel import algorithms, tasks, training
from tff_fedlabel.algorithms import local_training, supervised
from tff_fedlabel.augmentation import WeakAugment

EQUALLY = dataclasses.replace(
    supervised.FEDAVG, name="small_equally", uniform_mean=True, server_momentum=0.5
)
COHORT = [random_client(1), random_client(2, labeled=8)]


def two_rounds(process, device_runtime):
    with device_runtime.installed():
        state = process.initialize()
        for _ in range(2):
            state = process.next(state, [to_tff(client) for client in COHORT]).state
        return [np.asarray(w) for w in process.get_model_weights(state).trainable]


def momentum_rounds(weigh):
    """FedAvg with a server momentum of .5, in NumPy."""
    weights = [np.float64(np.float32(w)) for w in initial_weights()]
    velocity = [np.zeros_like(w) for w in weights]
    for _ in range(2):
        outputs = [Reference().client(weights, labeled, []) for labeled, _ in COHORT]
        shares = np.array([weigh(r) for _, r in outputs])
        shares = shares / shares.sum()
        mean = [sum(s * d[i] for s, (d, _) in zip(shares, outputs, strict=True)) for i in range(2)]
        velocity = [0.5 * v + m for v, m in zip(velocity, mean, strict=True)]
        weights = [w + v for w, v in zip(weights, velocity, strict=True)]
    return weights


def test_a_methods_own_weighting_and_momentum_are_defaults(device_runtime):
    build, sgd = EQUALLY.__call__, tff.learning.optimizers.build_sgdm
    model = build_model(initial_weights())
    learning_rate = 0.3  # The one of `Reference`.
    actual = two_rounds(build(model, sgd(learning_rate)), device_runtime)
    assert_weights_close(actual, momentum_rounds(lambda r: 1.0))
    by_examples = build(
        model,
        sgd(learning_rate),
        client_weighting=tff.learning.ClientWeighting.NUM_EXAMPLES,
    )
    assert_weights_close(two_rounds(by_examples, device_runtime), momentum_rounds(lambda r: r))


def test_the_run_takes_the_methods_momentum_unless_it_has_its_own(monkeypatch):
    monkeypatch.setattr(algorithms, "METHODS", dict(algorithms.METHODS))
    algorithms.register(EQUALLY)
    assert training.make_config("digits").server_momentum == 0.0
    assert training.make_config("digits", "small_equally").server_momentum == 0.5
    assert training.make_config("digits", "small_equally", server_momentum=0.0).server_momentum == 0


def test_a_task_has_values_for_a_method(monkeypatch):
    task = dataclasses.replace(
        tasks.TASKS["digits"], by_method={"fedprox": {"lr": 0.25, "proximal_strength": 0.5}}
    )
    monkeypatch.setitem(tasks.TASKS, "digits", task)
    config = training.make_config("digits", "fedprox")
    assert config.lr == 0.25 and config.algorithm_config().proximal_strength == 0.5
    given = training.make_config("digits", "fedprox", lr=0.1, proximal_strength=0.0)
    assert given.lr == 0.1 and given.algorithm_config().proximal_strength == 0.0
    assert training.make_config("digits", "fedavg").lr == 0.05


@dataclasses.dataclass(frozen=True)
class WeakConfig:
    weak_augment: object = None
    seed: int = 0


def test_the_run_sets_the_weak_augmentation(monkeypatch):
    monkeypatch.setattr(algorithms, "METHODS", dict(algorithms.METHODS))
    algorithms.register(
        dataclasses.replace(supervised.FEDAVG, name="small_weak", config_class=WeakConfig)
    )
    for task, choices, expected in (
        ("digits", {}, WeakAugment(flip=False, max_shift=1)),
        ("emnist", {}, WeakAugment(flip=False)),
        ("cifar10", {}, WeakAugment()),
        ("cifar10", {"weak_augment": "none"}, None),
    ):
        config = training.make_config(task, "small_weak", **choices)
        assert config.algorithm_config().weak_augment == expected


@pytest.mark.parametrize("field, value", [("uniform_mean", 1), ("server_momentum", 1.5)])
def test_wrong_defaults_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field} of the method small_equally must be"):
        dataclasses.replace(EQUALLY, **{field: value})


def batches(sizes, drop_remainder=False):
    rows = np.arange(sum(sizes), dtype=np.float32)[:, np.newaxis]
    data = tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=rows, y=rows[:, 0]))
    return data.batch(sizes[0] if sizes else 2, drop_remainder=drop_remainder)


@pytest.mark.parametrize("known_length", [False, True])
@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize(
    "labeled, unlabeled, expected",
    [
        ([2, 2], [2, 2, 1], [(2, 2), (2, 2), (0, 1)]),
        ([2, 1], [2], [(2, 2), (1, 0)]),
        ([], [2, 2], [(0, 2), (0, 2)]),
        ([2], [], [(2, 0)]),
        ([], [], []),
    ],
)
def test_pairs_go_on_while_one_part_has_batches(
    labeled, unlabeled, expected, drop_remainder, known_length
):
    if drop_remainder:
        expected = [(a - a % 2, b - b % 2) for a, b in expected if (a, b) not in ((0, 1), (1, 0))]
    parts = [batches(labeled, drop_remainder), batches(unlabeled, drop_remainder)]
    if not known_length:
        parts = [part.filter(lambda batch: True) for part in parts]
        assert all(part.cardinality() == tf.data.UNKNOWN_CARDINALITY for part in parts)
    found = list(local_training.pairs(*parts))
    sizes = [(len(step["labeled"]["x"]), len(step["unlabeled"]["x"])) for step in found]
    assert sizes == expected
    for part in ("labeled", "unlabeled"):
        rows = np.concatenate([step[part]["y"] for step in found] + [[]])
        np.testing.assert_array_equal(rows, np.arange(len(rows)))


def test_ones_own_data_has_values_for_a_method(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((40, 8, 8, 1), np.uint8), y=np.arange(40) % 2)
    assert training.make_config(str(path), "fedmatch").lr == 0.005
    assert training.make_config(str(path), "fedavg").lr == 0.05
    assert training.make_config(str(path), "fedmatch", lr=0.1).lr == 0.1
