"""Whole FedMatch rounds through TFF, with memory and helpers, against float64 NumPy."""

import functools
import types

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from fedmatch_reference import Reference
from linear_model import build_model, initial_weights, random_client, to_tff
from weights import assert_weights_close, assert_weights_equal

from tff_fedlabel import algorithms, augmentation
from tff_fedlabel.algorithms import FedMatchConfig, _similar_clients, fedmatch
from tff_fedlabel.training.memory import ClientMemory

pytestmark = pytest.mark.usefixtures("device_runtime")

NEGATIVE = {"strong_augment": lambda images, *, seed: 1.0 - images}
# Strong enough for every term to show, and a refresh in rounds 1, 3 and 5 (from 0).
STRONG = {
    **NEGATIVE,
    "lambda_s": 1.0,
    "lambda_i": 2.0,
    "lambda_a": 1.0,
    "lambda_l2": 0.2,
    "lambda_l1": 0.05,
    "threshold": 0.5,
    "h_interval": 2,
}
NOT_FINITE = random_client(5)
NOT_FINITE[0][0][0][:] = np.nan
CLIENTS = {
    0: random_client(1),
    1: random_client(2, labeled=3, unlabeled=9),
    2: random_client(3, labeled=0, unlabeled=10),
    3: random_client(4, labeled=8, unlabeled=0),
    4: random_client(0, labeled=0, unlabeled=0),
    5: NOT_FINITE,
    6: random_client(6, labeled=5, unlabeled=5),
}
ROUNDS = [(0, 1, 2, 3), (0, 2, 4, 1), (3, 1, 5, 0), (0, 1, 2, 3, 6), (6, 2, 1), (3, 6, 0, 5)]


def start():
    return [np.float64(np.float32(w)) for w in initial_weights()]


@functools.cache
def _build(options, tail):
    model, config = build_model(initial_weights()), FedMatchConfig(**dict(options))
    tail = dict(tail)
    optimizer = tff.learning.optimizers.build_sgdm(0.3, momentum=tail.pop("momentum", None))
    process = fedmatch.METHOD(model, optimizer, config, **tail)
    memory = algorithms.initial_memory(fedmatch.METHOD, model, optimizer, config)
    image = _similar_clients.fixed_image(algorithms.Setup(model, optimizer, config))
    return process, memory, image.numpy()


def build(options, **tail):
    """Process, initial memory and fixed image; built and compiled once."""
    return _build(tuple(options.items()), tuple({"diagnose": True, **tail}.items()))


def run(built, rounds=ROUNDS, hidden=np.zeros, helpers=None, clients=CLIENTS):
    """Weights, psi and memory after the rounds, and the metrics of each."""
    process, initial, _ = built
    memory = ClientMemory(initial, fedmatch.METHOD.choose_helpers)
    state, history = process.initialize(), []
    for round_num, numbers in enumerate(rounds):
        cohort = [memory.attach(to_tff(clients[n], hidden), n, round_num, helpers) for n in numbers]
        output = process.next(state, cohort)
        state = output.state
        history.append(output.metrics["client_work"]["train"])
        memory.update(output.metrics["client_work"]["memory"])
    weights = process.get_model_weights(state).trainable
    return weights, state.client_work["method"]["psi"], memory, history


def reference(built, options, **more):
    known = {name: value for name, value in options.items() if name != "strong_augment"}
    if "strong_augment" in options:
        known["augment"] = lambda x, step: 1.0 - x
    return Reference(start(), built[2], **known, **more)


def check(built, expected, actual, rounds=ROUNDS):
    weights, psi, memory, history = actual
    for numbers, metrics in zip(rounds, history, strict=True):
        known = expected.round({number: CLIENTS[number] for number in numbers})
        assert set(metrics) == set(known)
        for name, value in known.items():
            np.testing.assert_allclose(metrics[name], value, atol=2e-5, rtol=2e-6, err_msg=name)
    assert_weights_close(weights, expected.theta)
    assert_weights_close(psi, expected.psi)
    assert set(expected.kept_by_server) == {
        n for n in memory if memory[n]["last"]["round_num"] >= 0
    }
    for number, entries in expected.kept_by_server.items():
        round_num, last_psi, answer = entries[-1]
        assert memory[number]["last"]["round_num"] == round_num
        assert_weights_close(memory[number]["last"]["psi"], last_psi)
        np.testing.assert_allclose(memory[number]["last"]["embedding"], answer, atol=2e-5)


def test_rounds_equal_numpy():
    built = build(STRONG)
    expected = reference(built, STRONG)
    actual = run(built)
    check(built, expected, actual)
    history = actual[3]
    assert [float(h["rejected_clients"]) for h in history] == [0, 0, 1, 0, 0, 1]
    # Nobody, then those that were there in round 0 (client 4 never uses an image), and so on;
    # client 6 is new in round 3 and has helpers from the next refresh on.
    counts = [float(h["helpers_per_client"]) for h in history]
    assert counts == pytest.approx([0, 1.5, 2, 1.6, 4 / 3, 2])
    assert 0 < history[-1]["kept_fraction"] < 1 and 0 < history[-1]["agreement_fraction"] < 1
    # The reference itself moved, and helpers make a difference.
    assert max(np.abs(w - w0).max() for w, w0 in zip(actual[0], start(), strict=True)) > 0.1
    alone = run(built, helpers=[])
    check(built, reference(built, STRONG, help_nobody=True), alone)
    assert max(np.abs(a - b).max() for a, b in zip(alone[0], actual[0], strict=True)) > 1e-2


def test_the_authors_choices_equal_numpy():
    """Also with momentum, which each part has for itself, and the other loop.

    Each client takes long in that one, so there are fewer; rounds 1 and 3 are those of a refresh.
    """
    options = {
        **STRONG,
        "helpers_at_refresh_only": True,
        "consistency_on": "kept",
        "threshold": 0.6,
        "num_helpers": 1,
        "psi_factor": 0.5,
    }
    reduce = tff.learning.LoopImplementation.DATASET_REDUCE
    built = build(options, momentum=0.5, loop_implementation=reduce)
    rounds = [(0, 1, 2), (0, 2, 1), (3, 5, 0), (0, 1, 2)]
    actual = run(built, rounds)
    check(built, reference(built, options, momentum=0.5), actual, rounds)
    assert [float(h["helpers_per_client"]) > 0 for h in actual[3]] == [False, True] * 2


def test_defaults_are_the_papers():
    """And, where it gives none, those of the authors' code."""
    values = dict(vars(FedMatchConfig()))
    assert values.pop("strong_augment") == augmentation.RandAugment()
    assert values == {
        **{"lambda_s": 10, "lambda_i": 1e-2, "lambda_a": 1e-2, "lambda_l2": 10, "lambda_l1": 1e-4},
        **{"threshold": 0.85, "num_helpers": 2, "h_interval": 10, "psi_factor": 0.2, "seed": 0},
        **{"helpers_at_refresh_only": False, "consistency_on": "all"},
    }
    assert fedmatch.METHOD.uniform_mean


def test_hidden_labels_cannot_change_the_update():
    rng = np.random.default_rng(0)
    known = run(build(STRONG))
    other = run(build(STRONG), hidden=lambda n: rng.integers(3, size=n))
    plain = run(build(STRONG, diagnose=False), hidden=None)
    for weights, psi, memory, _ in (other, plain):
        assert_weights_equal(weights, known[0])
        assert_weights_equal(psi, known[1])
        assert_weights_equal(*(tf.nest.flatten(m.state()) for m in (memory, known[2])))
    accuracies = [result[3][-1].get("pseudo_label_accuracy") for result in (known, other, plain)]
    assert accuracies[0] != accuracies[1] and accuracies[2] is None


def test_the_l1_term_leaves_zeros_alone():
    """The subgradient of |0| is 0: psi that starts at 0 stays there, and sigma is the model."""
    off = dict.fromkeys(("lambda_i", "lambda_a", "lambda_l2"), 0.0)
    options = {**STRONG, **off, "lambda_l1": 1.0, "psi_factor": 0.0, "num_helpers": 0}
    weights, psi, _, history = run(build(options), rounds=[(0, 1), (0, 2)])
    for p in psi:
        assert not np.any(p)
    assert history[-1]["helpers_per_client"] == 0 and history[-1]["unlabeled_loss"] == 0
    expected = reference(build(options), options)
    for numbers in ((0, 1), (0, 2)):
        expected.round({number: CLIENTS[number] for number in numbers})
    assert_weights_close(weights, expected.theta)


def test_the_fixed_image_is_truncated_gaussian_noise():
    from scipy import stats

    def image(shape, dtype, seed=0):
        spec = {"x": tf.TensorSpec([None, *shape], dtype), "y": tf.TensorSpec([None], tf.int32)}
        setup = algorithms.Setup(
            types.SimpleNamespace(input_spec=spec), None, FedMatchConfig(seed=seed)
        )
        return _similar_clients.fixed_image(setup)

    pixels = 255 * image((64, 64, 3), tf.float32).numpy()
    assert pixels.shape == (1, 64, 64, 3)
    expected = stats.truncnorm(-1, 130 / 125, loc=125, scale=125)
    assert stats.kstest(pixels.ravel(), expected.cdf).pvalue > 0.01
    assert_weights_equal([255 * image((64, 64, 3), tf.float32)], [pixels])
    assert np.any(image((8, 8, 1), tf.float32) != image((8, 8, 1), tf.float32, seed=1))
    grey = image((64, 64, 3), tf.uint8)
    assert grey.dtype == tf.uint8 and np.abs(grey.numpy() - pixels).max() <= 0.51
    assert image((None, None, 3), tf.float32).shape == (1, 32, 32, 3)
    assert not np.any(image((7,), tf.int32))


def memory_of(rounds, answers, **settings):
    """A memory with two snapshots."""
    entries = [
        {"round_num": np.int32(r), "psi": (), "embedding": np.float32(answer)}
        for r, answer in zip(rounds, answers, strict=True)
    ]
    known = {"num_helpers": 2, "h_interval": 5, "helpers_at_refresh_only": 0, **settings}
    return {**known, "before_refresh": entries[0], "last": entries[1]}


def test_helpers_are_the_nearest_at_the_last_refresh():
    """Rounds 4 and 9 (from 0) are those of a refresh."""
    memories = {
        1: memory_of((-1, 3), ([9, 9], [0, 0])),
        2: memory_of((3, 5), ([0, 5], [0, 0])),
        3: memory_of((-1, 2), ([0, 0], [0, 3])),
        4: memory_of((-1, 6), ([0, 0], [0, 1])),
        5: memory_of((-1, 0), ([0, 0], [3, 0])),
        6: memory_of((1, 7), ([4, 0], [8, 0])),
    }
    choose = fedmatch.METHOD.choose_helpers
    assert choose(memories, 1, 4) == choose(memories, 1, 8) == [3, 5]
    assert choose(memories, 1, 9) == [2, 4]
    assert choose(memories, 2, 8) == [3, 1]
    assert choose(memories, 5, 8) == [6, 1]
    # Those that have not taken part, at all or by then, and rounds before the first refresh.
    assert choose(memories, 7, 9) == choose(memories, 4, 8) == choose(memories, 1, 3) == []
    memories[1].update(num_helpers=4)
    assert choose(memories, 1, 8) == [3, 5, 6, 2]
    memories[1].update(num_helpers=9)
    assert choose(memories, 1, 9) == [2, 4, 3, 5, 6]
    memories[1].update(helpers_at_refresh_only=1, num_helpers=2)
    assert choose(memories, 1, 9) == [2, 4] and choose(memories, 1, 8) == []


@pytest.mark.parametrize("h_interval, first", [(1, 2), (2, 2), (10, 10)])
def test_a_run_without_helpers_is_said(h_interval, first):
    config = FedMatchConfig(h_interval=h_interval)
    # Of clients that take part in each round, those of round `first` are the first with helpers.
    rounds = range(first)
    memories = {
        n: memory_of((-1, first - 2), ([0, 0], [n, 0]), h_interval=h_interval) for n in "12"
    }
    helped = [len(fedmatch.METHOD.choose_helpers(memories, "1", r)) for r in rounds]
    assert helped == [0] * (first - 1) + [1]
    assert fedmatch.METHOD.advice(config, first) is None
    assert f"from round {first} on" in fedmatch.METHOD.advice(config, first - 1)
    assert fedmatch.METHOD.advice(FedMatchConfig(num_helpers=0), 1) is None


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"lambda_l1": -1.0}, "lambda_l1 must be a number of 0 or more"),
        ({"threshold": 1.5}, r"threshold must be a number in \[0, 1\]"),
        ({"num_helpers": -1}, "num_helpers must be a whole number"),
        ({"h_interval": 0}, "h_interval must be a whole number"),
        ({"consistency_on": "any"}, "consistency_on 'any' is unknown"),
        ({"helpers_at_refresh_only": 1}, "helpers_at_refresh_only must be True or False"),
        ({"strong_augment": 3}, "strong_augment must be None or a callable"),
        ({"seed": -1}, "seed must be a whole number"),
    ],
    ids=str,
)
def test_wrong_parameters_are_named(wrong, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        FedMatchConfig(**wrong)
