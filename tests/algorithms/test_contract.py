"""What every registered method promises, and the four small ones that use what none does yet."""

import functools

import four_methods
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client, to_tff
from numpy_reference import CLASSES, SHAPE, Reference
from weights import assert_weights_close, assert_weights_equal
from worker_processes import address, one_worker

from tff_fedlabel import _parameters, algorithms, runtime
from tff_fedlabel.training.memory import ClientMemory

sgd = tff.learning.optimizers.build_sgdm
METHODS = [*algorithms.METHODS.values(), *four_methods.ALL]
COHORT = [random_client(1), random_client(2, labeled=3), random_client(3, labeled=8)]
SERVER_LABELS = dict(zip("xy", random_client(9, labeled=4, unlabeled=0)[0][0], strict=True))
# FedMatch's own values suit learning rates of about .001, and its helpers come in the tenth round.
PARAMETERS = {"fedmatch": {"lambda_s": 1.0, "lambda_l2": 0.1, "threshold": 0.5, "h_interval": 1}}
by_name = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
# These are UDA and FixMatch with the proximal term that FedProx has.
TWINS = ("fedprox_uda", "fedprox_fixmatch")
WITHOUT_TWINS = [method for method in METHODS if method.name not in TWINS]


def build(method, learning_rate=0.3, **tail):
    # The images are too small to augment, and a linear model is not sure of much.
    wanted = {"strong_augment": None, "weak_augment": None, "threshold": 0.5}
    known = method.config_class.__dataclass_fields__
    wanted |= PARAMETERS.get(method.name, {})
    config = method.config_class(**{k: v for k, v in wanted.items() if k in known})
    if method.server_training is not None:
        tail["server_data"] = SERVER_LABELS
    return method(build_model(initial_weights()), sgd(learning_rate), config, **tail)


def new_memory(method):
    initial = algorithms.initial_memory(method, build_model(initial_weights()), sgd(0.3))
    return None if initial is None else ClientMemory(initial, method.choose_helpers)


def train(process, method, cohorts, hidden=None):
    """Trains on lists of (client number, client); returns weights, all metrics, memory."""
    state, memory, history = process.initialize(), new_memory(method), []
    for round_num, cohort in enumerate(cohorts):
        data = [to_tff(client, hidden) for _, client in cohort]
        if memory is not None:
            numbers = [number for number, _ in cohort]
            data = [memory.attach(d, n, round_num) for d, n in zip(data, numbers, strict=True)]
        output = process.next(state, data)
        state = output.state
        history.append(output.metrics["client_work"])
        if memory is not None:
            memory.update(history[-1]["memory"])
    weights = [np.asarray(w) for w in process.get_model_weights(state).trainable]
    return weights, history, memory


NUMBERED = list(enumerate(COHORT))
THREE_ROUNDS = [NUMBERED, NUMBERED[::-1], NUMBERED[1:]]


@functools.cache
def built(method):
    """The process of most tests; built, and compiled by each runtime, once."""
    return build(method)


@functools.cache
def built_anew(method):
    """A second process; that it trains as the first one shows that building draws nothing."""
    return build(method)


@pytest.fixture(scope="module")
def trained(device_runtime):
    """The device runtime, and what three rounds of each method on it gave."""
    return device_runtime, {}


def in_device(trained, method):
    device, results = trained
    if method.name not in results:
        with device.installed():
            results[method.name] = train(built(method), method, THREE_ROUNDS)
    return results[method.name]


@by_name
def test_three_rounds_move_the_weights_and_stay_finite(trained, method):
    weights, history, _ = in_device(trained, method)
    for before, after in zip(initial_weights(), weights, strict=True):
        assert np.isfinite(after).all() and np.abs(after - before).max() > 1e-3
    for metrics in history:
        assert metrics["train"]["rejected_clients"] == 0.0
        assert metrics["train"]["images_used"] >= 11


@pytest.fixture(scope="module")
def two_workers(local_runtime):
    """Clients are divided over two of TFF's workers, and what they send is merged.

    After `local_runtime`: TFF's contexts are a stack, so what begins later must end before.
    """
    with one_worker() as first, one_worker() as second:
        addresses = [address(first.port), address(second.port)]
        with runtime.use("workers", addresses=addresses) as handle:
            yield handle


# A worker computes what a client does just so in TFF's runtime for one of them. How the server's
# part is compiled for that one differs, and shows with a method of each kind.
OF_EACH_KIND = [*four_methods.ALL, algorithms.METHODS["fedlabel"]]


@pytest.mark.parametrize(
    "where,method",
    [
        *(("two_workers", method) for method in WITHOUT_TWINS),
        *(("local_runtime", method) for method in OF_EACH_KIND),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_other_runtimes_agree(trained, method, where, request):
    """On two workers also where the process is built anew."""
    expected, history, memory = in_device(trained, method)
    process = built_anew(method) if where == "two_workers" else built(method)
    with request.getfixturevalue(where).installed():
        weights, other_history, other_memory = train(process, method, THREE_ROUNDS)
    assert_weights_close(weights, expected)
    for a, b in zip(tf.nest.flatten(other_history), tf.nest.flatten(history), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert (memory is None) == (other_memory is None)
    if memory is not None:
        assert list(memory) == list(other_memory) == [0, 1, 2]


@by_name
def test_a_seed_repeats_itself(trained, method):
    """To the bit; with a method of each kind also where it is built, and compiled, anew."""
    expected, _, _ = in_device(trained, method)
    with trained[0].installed():
        again, _, _ = train(built(method), method, THREE_ROUNDS)
    assert_weights_equal(again, expected)
    if method in OF_EACH_KIND:
        with runtime.use("device"):
            anew, _, _ = train(built_anew(method), method, THREE_ROUNDS)
        assert_weights_equal(anew, expected)


@pytest.mark.parametrize("method", WITHOUT_TWINS, ids=lambda method: method.name)
def test_the_tail_is_the_same_for_all(method):
    """One call, one data format, finite progress, a hyper-parameter to set."""
    # An aggregator knows nothing of a method but the type of its weights. Clipping takes longest.
    aggregator = tff.learning.robust_aggregator(clipping=method.name in ("fedlabel", "fedmatch"))
    tail = {} if method.aggregate else {"model_aggregator": aggregator}
    process = build(
        method,
        0.2,
        server_optimizer=sgd(0.5),
        client_weighting=tff.learning.ClientWeighting.UNIFORM,
        loop_implementation=tff.learning.LoopImplementation.DATASET_REDUCE,
        diagnose=True,
        **tail,
    )
    assert isinstance(process, tff.learning.templates.LearningProcess)
    with runtime.use("device"):
        weights, history, _ = train(process, method, [NUMBERED], hidden=np.zeros)
        state = process.initialize()
        hparams = process.get_hparams(state)
    for before, after in zip(initial_weights(), weights, strict=True):
        assert np.isfinite(after).all() and np.abs(after - before).max() > 1e-4
    assert history[0]["train"]["images_used"] >= 14
    assert hparams["client_work"]["learning_rate"] == pytest.approx(0.2)
    assert state.client_work["round_num"] == 0


@by_name
def test_empty_clients_and_cohorts(method, device_runtime):
    """A cohort of clients with nothing leaves the weights; it is not even an error."""
    nothing = [(0, random_client(5, 0, 0)), (1, random_client(6, 0, 0))]
    with device_runtime.installed():
        weights, history, _ = train(built(method), method, [nothing])
    assert history[0]["train"]["images_used"] == 0.0
    if method.server_training is None:
        assert_weights_equal(weights, [np.float32(w) for w in initial_weights()])


@by_name
def test_parameters_are_explained(method):
    for parameter in _parameters.of(method.config_class).values():
        assert len(parameter.help) > 5, parameter
    assert "config" in method.__call__.__code__.co_varnames


def reference(weights, cohort, change=lambda number, delta: delta):
    """FedAvg's deltas and r_k in float64 NumPy."""
    outputs = [Reference().client(weights, labeled, []) for _, (labeled, _) in cohort]
    return [(change(n, d), r) for (n, _), (d, r) in zip(cohort, outputs, strict=True)]


def mean(weights, outputs):
    total = sum(r for _, r in outputs)
    return [w + sum(r * d[i] for d, r in outputs) / total for i, w in enumerate(weights)]


def start():
    return [np.float64(np.float32(w)) for w in initial_weights()]


def test_state_at_the_server_equals_numpy(trained):
    weights, factor = start(), 1.0
    for cohort in THREE_ROUNDS:
        outputs = reference(weights, cohort, lambda n, d, f=factor: [f * part for part in d])
        weights = mean(weights, outputs)
        factor /= 1 + 0.5 * sum(r for _, r in outputs) / 100
    assert_weights_close(in_device(trained, four_methods.AT_SERVER)[0], weights)


def test_memory_of_clients_equals_numpy(trained):
    weights, last, rounds = start(), {}, {}
    helped = []
    for cohort in THREE_ROUNDS:
        known = dict(rounds)
        helped.append(sum(sum([known[c] for c in known if c != n][:2]) for n, _ in cohort))

        def change(number, delta):
            before = last.get(number, [0 * d for d in delta])
            return [d + 0.5 * b for d, b in zip(delta, before, strict=True)]

        outputs = reference(weights, cohort, change)
        for (number, _), (delta, _) in zip(cohort, outputs, strict=True):
            last[number], rounds[number] = delta, rounds.get(number, 0) + 1
        weights = mean(weights, outputs)
    actual, history, memory = in_device(trained, four_methods.WITH_MEMORY)
    assert_weights_close(actual, weights)
    assert {client: value["rounds"] for client, value in memory.items()} == rounds
    for client, value in memory.items():
        assert_weights_close(value["delta"], last[client])
    assert [float(h["train"]["helpers_rounds"]) for h in history] == helped
    floats = sum(w.size for w in weights) + 1
    assert memory.nbytes == 3 * 4 * floats


def test_a_client_that_is_left_out_keeps_its_memory(device_runtime):
    broken = random_client(7)
    broken[0][0][0][:] = np.nan
    method = four_methods.WITH_MEMORY
    with device_runtime.installed():
        _, _, once = train(built(method), method, [[(4, COHORT[0])]])
        _, history, twice = train(built(method), method, [[(4, COHORT[0])], [(4, broken)]])
    assert history[1]["train"]["rejected_clients"] == 1.0
    assert_weights_equal(tf.nest.flatten(twice[4]), tf.nest.flatten(once[4]))


def test_memory_survives_a_checkpoint(trained):
    memory = in_device(trained, four_methods.WITH_MEMORY)[2]
    restored = new_memory(four_methods.WITH_MEMORY)
    restored.restore(memory.state())
    assert list(restored) == list(memory)
    for client in memory:
        assert_weights_equal(tf.nest.flatten(restored[client]), tf.nest.flatten(memory[client]))
    empty = new_memory(four_methods.WITH_MEMORY)
    assert all(len(a) == 0 for a in tf.nest.flatten(empty.state()))


def test_labels_at_the_server_equal_numpy(trained):
    weights = start()
    at_server = (SERVER_LABELS["x"], SERVER_LABELS["y"])
    for cohort in THREE_ROUNDS:
        weights = mean(weights, reference(weights, cohort))
        delta, _ = Reference().client(weights, [at_server], [])
        weights = [w + d for w, d in zip(weights, delta, strict=True)]
    assert_weights_close(in_device(trained, four_methods.LABELS_AT_SERVER)[0], weights)


def test_own_aggregation_equals_numpy(trained):
    weights = start()
    for cohort in THREE_ROUNDS:
        outputs = reference(weights, cohort)
        lengths = [sum((part**2).sum() for part in d) for d, _ in outputs]
        kept = [(d, r * (1 + r)) for i, (d, r) in enumerate(outputs) if i != np.argmax(lengths)]
        weights = mean(weights, kept)
    assert_weights_close(in_device(trained, four_methods.OWN_AGGREGATION)[0], weights)


def test_what_does_not_go_with_a_method_is_named():
    with pytest.raises(ValueError, match="^server_data must be left out: fedavg"):
        algorithms.build_fedavg(build_model(initial_weights()), sgd(0.1), server_data=SERVER_LABELS)
    method = four_methods.LABELS_AT_SERVER
    with pytest.raises(ValueError, match="^server_data must be a mapping"):
        method(build_model(initial_weights()), sgd(0.1))
    wrong = {"x": np.zeros((3, 5), np.float32), "y": np.zeros(3, np.int32)}
    with pytest.raises(ValueError, match=r"x is float32 \[3, 5\]"):
        method(build_model(initial_weights()), sgd(0.1), server_data=wrong)
    with pytest.raises(ValueError, match="small_aggregation has its own aggregation"):
        build(four_methods.OWN_AGGREGATION, model_aggregator=tff.learning.robust_aggregator())
    with pytest.raises(ValueError, match="a method named fedavg already exists"):
        algorithms.register(algorithms.Method("fedavg", four_methods.SmallConfig, lambda s, c: c))
    with pytest.raises(ValueError, match="server_state but no server_update"):
        algorithms.Method("a", four_methods.SmallConfig, lambda s, c: c, server_state=lambda s: 0)
    assert (CLASSES, SHAPE) == (3, (2, 2, 1))
