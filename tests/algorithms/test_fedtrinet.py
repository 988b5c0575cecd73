"""Whole FedTriNet rounds through TFF against float64 NumPy; its schedules; its memory."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from fedtrinet_reference import FedTriNet
from linear_model import build_model, initial_weights, random_client, to_tff
from numpy_reference import CLASSES, FEATURES
from small_run import SMALL
from trained_runs import checkpoint
from weights import assert_weights_close, assert_weights_equal

from tff_fedlabel import algorithms, models, training
from tff_fedlabel.algorithms import FedTriNetConfig, build_fedtrinet, fedtrinet
from tff_fedlabel.training.memory import ClientMemory

pytestmark = pytest.mark.usefixtures("device_runtime")

LOOPS = tff.learning.LoopImplementation
# Rounds 0 and 1 are phase 1. In phase 2 the weight is 0 in rounds 0 and 1, half in 2, full from 3
# on; the threshold stays in 0 to 2, falls in 3 and 4, and is final from 5 on.
CROSSING = {
    "warmup_rounds": 2,
    "threshold_hold": 3,
    "threshold_decay": 0.06,
    "threshold_end": 5,
    "threshold_final": 0.7,
    "ramp_start": 1,
    "ramp_end": 3,
}
# Client 1 has no labels, 2 no unlabelled images, 3 nothing; 4 comes first in phase 2, and once with
# a NaN; 5 has more labelled than unlabelled batches.
DRAWN = [(0, 1, 2), (0, 2, 3, 5), (1, 5), (0, 4, 5), (0, 1, 2, 3), (1, 4, 5), (0, 2, 5), (0, 1, 4)]
NAN_ROUND = 5
SIZES = {0: (11, 14), 1: (0, 13), 2: (9, 0), 3: (0, 0), 4: (6, 17), 5: (15, 6)}


def two_layer_weights():
    rng = np.random.default_rng(1)
    shapes = [(FEATURES, 5), (5,), (5, CLASSES), (CLASSES,)]
    return [1.2 * rng.normal(size=shape) for shape in shapes]


def two_layer_model(weights):
    @tf.function
    def predict(model_weights, x, training=True):
        del training
        kernel_1, bias_1, kernel_2, bias_2 = model_weights[0]
        return tf.tanh(tf.reshape(x, [-1, FEATURES]) @ kernel_1 + bias_1) @ kernel_2 + bias_2

    linear = build_model(initial_weights())
    return tff.learning.models.FunctionalModel(
        initial_weights=(tuple(np.float32(w) for w in weights), ()),
        predict_on_batch_fn=predict,
        loss_fn=linear.loss,
        input_spec=linear.input_spec,
    )


MODELS = {
    "linear": (build_model, initial_weights),
    "two_layers": (two_layer_model, two_layer_weights),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a process is built from; `shared` weights are those of the first layers."""

    model: str = "two_layers"
    shared: int = 2
    momentum: float = 0.5
    loop: LOOPS = LOOPS.DATASET_ITERATOR
    diagnose: bool = False
    config: FedTriNetConfig = FedTriNetConfig(**CROSSING, first_layers=1, start_from="spliced")

    def parts(self):
        build, weights = MODELS[self.model]
        optimizer = tff.learning.optimizers.build_sgdm(0.3, momentum=self.momentum or None)
        return build(weights()), optimizer

    def reference(self):
        c = self.config
        return FedTriNet(
            MODELS[self.model][1](),
            self.shared,
            c.warmup_rounds,
            c.start_from,
            c.refresh_mean,
            hold=c.threshold_hold,
            decay=c.threshold_decay,
            end=c.threshold_end,
            final=c.threshold_final,
            t1=c.ramp_start,
            t2=c.ramp_end,
            momentum=self.momentum,
        )


SPLICED = Case()
# All weights are the same to it, so the model with fewer serves, here with momentum.
GLOBAL = Case(
    "linear",
    0,
    config=dataclasses.replace(SPLICED.config, start_from="global", refresh_mean=False),
)
LINEAR = Case(
    "linear", 0, 0.0, diagnose=True, config=FedTriNetConfig(**CROSSING, start_from="spliced")
)
AT_ONCE = Case(
    "linear",
    0,
    0.0,
    config=FedTriNetConfig(
        warmup_rounds=0,
        start_from="spliced",
        threshold_hold=1,
        refresh_mean=False,
        ramp_start=0,
        ramp_end=0,
    ),
    loop=LOOPS.DATASET_REDUCE,  # Here, as each of its rounds takes long.
)


@functools.cache
def built(case):
    model, optimizer = case.parts()
    return build_fedtrinet(
        model, optimizer, case.config, loop_implementation=case.loop, diagnose=case.diagnose
    )


def cohort_of(round_num, drawn=DRAWN):
    found = {n: random_client(100 * round_num + n, *SIZES[n]) for n in drawn[round_num]}
    if round_num == NAN_ROUND and 4 in found:
        found[4][0][0][0][:] = np.nan
    return found


def new_memory(case):
    method = algorithms.METHODS["fedtrinet"]
    return ClientMemory(algorithms.initial_memory(method, *case.parts(), case.config))


def run(case, rounds=8, drawn=DRAWN, hidden=None, after_round=lambda *_: None):
    """Returns the weights and the rounds' metrics; `after_round` gets weights, metrics, memory."""
    process, memory = built(case), new_memory(case)
    hidden = hidden or (np.zeros if case.diagnose else None)
    state, history = process.initialize(), []
    for round_num in range(rounds):
        data = [
            memory.attach(to_tff(client, hidden), number, round_num)
            for number, client in cohort_of(round_num, drawn).items()
        ]
        output = process.next(state, data)
        state = output.state
        memory.update(output.metrics["client_work"]["memory"])
        weights = [np.asarray(w) for w in process.get_model_weights(state).trainable]
        history.append(output.metrics["client_work"]["train"])
        after_round(weights, history[-1], memory)
    return weights, history


def check(case, **options):
    """Compares all that a run leaves behind, round by round, with NumPy."""
    reference, shares = case.reference(), []

    def compare(weights, metrics, memory):
        r = reference.round_num - case.config.warmup_rounds
        known = reference.mean is not None
        cohort = cohort_of(reference.round_num, options.get("drawn", DRAWN))
        alpha = reference.alpha(r) if r >= 0 else 0.0
        theta = reference.theta(r) if alpha > 0 and known else 0.0
        (voted, kept, _), used, broken = reference.round(cohort)
        assert_weights_close(weights, reference.weights)
        assert metrics["images_used"] == used and metrics["rejected_clients"] == broken
        share = kept / voted if voted else 0.0
        np.testing.assert_allclose(metrics["kept_fraction"], share, rtol=1e-6)
        np.testing.assert_allclose(metrics["threshold"], theta, atol=2e-5)
        assert metrics["pseudo_label_weight"] == pytest.approx(alpha)
        assert ("pseudo_label_accuracy" in metrics) == case.diagnose
        if case.config.refresh_mean and r >= -1:
            assert metrics["max_probability"] == pytest.approx(reference.mean, abs=2e-5)
        remembered = {n for n in memory if memory[n]["exists"] == 1.0}
        assert remembered == set(reference.own)
        for number in remembered:
            assert_weights_close(memory[number]["weights"], reference.own[number])
        shares.extend([kept / voted] if voted else [])

    run(case, after_round=compare, **options)
    # No vote was so close that rounding could turn it, and the threshold decided something.
    assert reference.margin > 1e-4
    assert any(0 < share < 1 for share in shares)
    return reference


@pytest.mark.parametrize("case", [SPLICED, GLOBAL, LINEAR], ids=["spliced", "global", "linear"])
def test_rounds_equal_numpy(case):
    reference = check(case)
    assert set(reference.own) == {0, 1, 2, 4, 5}
    moved = [np.abs(w - w0).max() for w, w0 in zip(reference.weights, MODELS[case.model][1]())]  # noqa: B905
    assert min(moved) > 0.1


def test_without_phase_1_the_first_round_measures_and_the_next_one_labels():
    reference = check(AT_ONCE, drawn=[(0, 5), (0, 1, 2), (1, 5)], rounds=3)
    assert reference.mean is not None


def test_the_worker_computes_the_same(local_runtime):
    expected, history = run(SPLICED)
    with local_runtime.installed():
        weights, other = run(SPLICED)
    assert_weights_close(weights, expected)
    for a, b in zip(tf.nest.flatten(other), tf.nest.flatten(history), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_hidden_labels_cannot_change_an_update():
    """They are told in the process that `test_rounds_equal_numpy[linear]` finds to be right."""
    rng = np.random.default_rng(0)
    draws = (np.ones, lambda n: rng.integers(CLASSES, size=n))
    (ones, history), (drawn, other) = (run(LINEAR, hidden=hidden) for hidden in draws)
    assert_weights_equal(ones, drawn)
    assert history[-1]["pseudo_label_accuracy"] != other[-1]["pseudo_label_accuracy"]
    reference = LINEAR.reference()
    for round_num, metrics in enumerate(history):
        (_, kept, right), _, _ = reference.round(cohort_of(round_num), hidden=1)
        share = right / kept if kept else 0.0
        np.testing.assert_allclose(metrics["pseudo_label_accuracy"], share, rtol=1e-6)


def test_a_left_out_client_keeps_its_own_model():
    """It comes with a NaN in round 5, after it trained in round 3."""
    memories = []
    run(SPLICED, 6, after_round=lambda w, m, memory: memories.append(memory.state()))
    kept = [
        np.asarray(part)[list(memory["client"]).index(4)]
        for memory in (memories[3], memories[5])
        for part in tf.nest.flatten(memory["value"])
    ]
    assert_weights_equal(kept[: len(kept) // 2], kept[len(kept) // 2 :])
    assert any(np.abs(part).max() > 0.1 for part in kept)


def schedule(function, **parameters):
    config = FedTriNetConfig(**parameters)
    return [float(function(config, tf.constant(r))) for r in range(-1, 41)][1:]


def test_the_schedules_of_the_source():
    factor, alpha = schedule(fedtrinet.threshold_factor), schedule(fedtrinet.ramped_weight)
    assert factor[0] == factor[9] == pytest.approx(2.8)
    assert factor[10] == pytest.approx(2.8 * 0.8) and factor[34] == pytest.approx(0.896)
    assert factor[35] == factor[40] == pytest.approx(1.4)
    # In epochs, 5 a round: 0 before epoch 50, .5 (epoch - 50) / 100, .5 after epoch 150.
    expected = [min(max(0.5 * (5 * r - 50) / 100, 0.0), 0.5) for r in range(41)]
    assert alpha == pytest.approx(expected)
    step = schedule(fedtrinet.ramped_weight, ramp_start=7, ramp_end=7, pseudo_label_weight=2.0)
    assert step == [0.0] * 7 + [2.0] * 34
    assert float(fedtrinet.ramped_weight(FedTriNetConfig(ramp_start=0), tf.constant(-3))) == 0.0


@pytest.mark.parametrize("warmup, start, end", [(40, 10, 30), (3, 2, 3), (1, 0, 0), (2, 5, 5)])
def test_a_run_without_a_pseudo_label_is_said(warmup, start, end):
    """A round, counted from 1, is too few where the weight of pseudo-labels was never above 0."""
    config = FedTriNetConfig(warmup_rounds=warmup, ramp_start=start, ramp_end=end)
    weights = [float(fedtrinet.ramped_weight(config, tf.constant(r))) for r in range(80)]
    first = warmup + next(r for r, weight in enumerate(weights) if weight > 0) + 1
    assert fedtrinet.METHOD.advice(config, first) is None
    assert f"from round {first} on (warmup_rounds {warmup}" in fedtrinet.advice(config, first - 1)


def test_without_phase_1_no_round_is_the_first_to_label():
    """Its m is not known before: see `AT_ONCE`."""
    assert "from round 2 on" in fedtrinet.advice(AT_ONCE.config, 1)
    assert fedtrinet.advice(AT_ONCE.config, 2) is None


def test_first_layers_are_whole_layers():
    def first(name, first_layers=2, **options):
        model = models.MODELS[name]((16, 16, 1), 10, **options)
        shapes = [w.shape for w in model.trainable_weights]
        names = [w.name for w in model.trainable_weights]
        return names[: fedtrinet.num_first_weights(shapes, first_layers)]

    assert [n.split("/")[1] for n in first("cnn", width=2)] == ["kernel:0", "bias:0"] * 2
    kinds = [n.split("/")[1] for n in first("resnet18", width=4)]
    assert kinds == ["kernel:0", "gamma:0", "beta:0"] * 2
    assert len(first("cnn", 99, width=2)) == 6 and not first("cnn", 0, width=2)
    assert fedtrinet.num_first_weights([(4, 3), (3,)], 2) == 0
    # The source's network for colour images: 24 tensors, of which 6 are in conv1 and conv2.
    conv, dense, vector = (3, 3, 8, 8), (8, 8), (8,)
    block = [conv, *[vector] * 3, conv, vector]
    assert fedtrinet.num_first_weights([*block * 3, *[dense, vector] * 3], 2) == 6


@pytest.mark.usefixtures("compile_once")
def test_killed_and_resumed_it_ends_in_the_same_bits(tmp_path):
    """In a round that had labelled images, after the last checkpoint."""
    choices = {**SMALL, "rounds": 6, "warmup_rounds": 1, "ramp_start": 0, "ramp_end": 2}
    choices["eval_every"] = 6  # Each evaluation may save the best model so far.
    experiment = training.build(training.make_config("digits", "fedtrinet", **choices))

    def and_stop(round_num, metrics):
        if round_num == 5:
            assert metrics["threshold"] > 0
            raise RuntimeError("killed")

    whole = training.run(experiment, tmp_path / "whole", runtime="device", checkpoint_every=6)
    with pytest.raises(RuntimeError, match="killed"):
        training.run(
            experiment,
            tmp_path / "killed",
            runtime="device",
            checkpoint_every=4,
            on_round=and_stop,
        )
    summary = training.run(experiment, tmp_path / "killed", runtime="device", resume=True)
    assert_weights_equal(
        checkpoint(tmp_path / "killed", "round_6"), checkpoint(tmp_path / "whole", "round_6")
    )
    assert summary["memory_bytes"] == whole["memory_bytes"] > 0


def test_parameters_out_of_range_are_named():
    for field, value in (
        ("start_from", "local"),
        ("threshold_scale", 3.5),
        ("warmup_rounds", -1),
        ("refresh_mean", 1),
        ("pseudo_label_weight", -0.5),
    ):
        with pytest.raises(ValueError, match=f"^{field} "):
            FedTriNetConfig(**{field: value})
    with pytest.raises(ValueError, match="^ramp_end must be ramp_start, 10, or more, got 9"):
        FedTriNetConfig(ramp_end=9)


def test_secure_aggregation_is_refused():
    with pytest.raises(ValueError, match="fedtrinet cannot be aggregated securely"):
        build_fedtrinet(*LINEAR.parts(), model_aggregator=tff.learning.secure_aggregator())
