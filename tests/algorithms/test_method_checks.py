"""What users' own methods return wrongly is told in one line, when the process is built."""

import collections
import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client, to_tff
from weights import assert_weights_close, assert_weights_equal

from tff_fedlabel import algorithms

NAN = float("nan")
CLIENTS = [random_client(1), random_client(2, labeled=3)]
SERVER_LABELS = dict(zip("xy", CLIENTS[0][0][0], strict=True))
START = [np.float32(w) for w in initial_weights()]


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing.

    Attributes:
      seed: Unused.
    """

    seed: int = 0


def output(setup, client, **wrong):
    """Adds 1 to each weight, and counts 2 images."""
    right = algorithms.ClientOutput(
        delta=tuple(tf.ones_like(w) for w in client.weights),
        num_examples=tf.constant(2.0),
        model_metrics=setup.model.initialize_metrics_state(),
        metrics=collections.OrderedDict(),
    )
    return right._replace(**wrong)


def method(client_update=output, **fields):
    return algorithms.Method("mine", Config, client_update, reads_unlabeled=False, **fields)


def build(made):
    data = {} if made.server_training is None else {"server_data": SERVER_LABELS}
    optimizer = tff.learning.optimizers.build_sgdm(0.1)
    return made(build_model(initial_weights()), optimizer, **data)


def told(made):
    """The message of the error that building gives."""
    with pytest.raises(algorithms.MethodError) as caught:
        build(made)
    text = str(caught.value)
    assert "\n" not in text and "mine" in text and len(text) < 300
    return text


def metric(name, *values):
    return {"metrics": {name: values}}


def wide(delta):
    return tuple(tf.cast(d, tf.float64) for d in delta)


def cases(named):
    return pytest.mark.parametrize("wrong,words", list(named.values()), ids=list(named))


@cases(
    {
        "None": (lambda o: None, "must return a tff_fedlabel.algorithms.ClientOutput, got None"),
        "tuple": (lambda o: tuple(o), "ClientOutput, got a tuple of 6"),
        "dict": (lambda o: o._asdict(), "ClientOutput, got a mapping with delta"),
        "delta short": ({"delta": lambda d: d[:1]}, "one for each trainable .* got a tuple of 1"),
        "delta None": ({"delta": lambda d: (None, d[1])}, "of tensors, got None for weight 0"),
        "reversed": ({"delta": lambda d: d[::-1]}, r"\[3\] for weight 0, expected \[4, 3\]"),
        "scalar": ({"delta": lambda d: (d[0], 1.0)}, r"\[\] for weight 1, expected \[3\]"),
        "float64": ({"delta": wide}, "float64 for weight 0, expected float32"),
        "images vector": ({"num_examples": np.ones(2)}, r"num_examples .*, got float64 \[2\]"),
        "images bool": ({"num_examples": tf.constant(True)}, "num_examples .* got bool"),
        "model_metrics": ({"model_metrics": None}, "model_metrics .* must have the structure of"),
        "metrics None": ({"metrics": None}, "must be an OrderedDict .* got None"),
        "bare": ({"metrics": {"a": tf.constant(1.0)}}, "metric 'a' .* must be .total,."),
        "triple": (metric("a", 1.0, 1.0, 1.0), "metric 'a' .* got a tuple of 3"),
        "vector": (metric("a", np.ones(3)), r"metric 'a' .* got float64 \[3\]"),
        "images_used": (metric("images_used", 1.0), "'images_used' .* another name"),
        "accuracy": (metric("accuracy", 1.0), "'accuracy' .* the trainer has"),
        "round": (metric("round", 1.0), "'round' .* another name"),
    }
)
def test_a_wrong_client_output_is_refused(wrong, words):
    def client_update(setup, client):
        right = output(setup, client)
        if callable(wrong):
            return wrong(right)
        changed = {k: v(right.delta) if k == "delta" else v for k, v in wrong.items()}
        return right._replace(**changed)

    text = told(method(client_update))
    assert "client_update of mine" in text
    assert re.search(words, text), text


def sending(value):
    return lambda setup, client: output(setup, client, sent=value)


def remembering(value):
    return lambda setup, client: output(setup, client, memory=value)


def at_server(update, state=lambda setup: {"a": tf.constant(0.0)}, sent=1.0):
    return method(sending(sent), server_state=state, server_update=update)


def with_memory(value, initial=lambda setup: {"a": tf.ones([3])}):
    return method(remembering(value), initial_memory=initial)


def aggregating(aggregate):
    return method(aggregate=lambda setup, clients: aggregate(clients.delta))


def training(train):
    return method(server_training=lambda setup, server: train(server.weights))


def starting(start):
    return method(initial_weights=lambda setup: start(setup.model.initial_weights[0]))


def same(setup, state, sent):
    return state


def updating(update):
    return at_server(lambda setup, state, sent: update(sent))


A = {"a": tf.constant(1.0)}


@cases(
    {
        "sent bool": (lambda: at_server(same, sent=True), "sent of client_update .* got bool"),
        "sent text": (lambda: at_server(same, sent={"b": "c"}), r"sent\['b'\] .* got string"),
        "state ()": (
            lambda: at_server(same, lambda setup: ()),
            "server_state of .* one tensor",
        ),
        "state None": (lambda: at_server(same, lambda setup: None), "server_state of mine .* None"),
        "update names": (
            lambda: updating(lambda sent: {"b": sent}),
            "server_update of mine .* structure of server_state, a mapping with a, .* with b",
        ),
        "update dtype": (lambda: updating(lambda sent: {"a": tf.constant(1)}), r"int32 at \['a'\]"),
        "update shape": (lambda: updating(lambda sent: {"a": tf.ones(2)}), r"\[2\] at \['a'\], ex"),
        "memory ()": (lambda: with_memory(()), "memory of .* have the structure of initial_memory"),
        "memory scalar": (lambda: with_memory(A), r"memory .* \[\] at \['a'\], expected \[3\]"),
        "memory names": (lambda: with_memory({"b": tf.ones([3])}), "got a mapping with b"),
        "initial text": (
            lambda: with_memory((), lambda s: {"a": "b"}),
            r"string \[\] at \['a'",
        ),
        "initial None": (lambda: with_memory((), lambda s: None), "initial_memory of mine .* None"),
        "ragged": (
            lambda: with_memory((), lambda setup: tf.ragged.constant([[1.0], []])),
            "initial_memory of mine must be made of tensors",
        ),
        "aggregate": (
            lambda: aggregating(lambda delta: tuple(tf.reduce_sum(d) for d in delta)),
            r"aggregate of mine has shape \[\] for weight 0, expected \[4, 3\]",
        ),
        "rows": (lambda: aggregating(lambda delta: delta), "aggregate of mine has shape"),
        "aggregate None": (
            lambda: aggregating(lambda delta: None),
            "aggregate of mine .* None",
        ),
        "training": (
            lambda: training(lambda weights: tuple(tf.zeros([1]) for _ in weights)),
            r"server_training of mine has shape \[1\] for weight 0, expected \[4, 3\]",
        ),
        "training short": (lambda: training(lambda weights: weights[:1]), "got a tuple of 1"),
        "start": (
            lambda: starting(lambda w: tuple(tf.zeros([1]) for _ in w)),
            r"initial_weights of mine has shape \[1\] for weight 0",
        ),
        "start None": (lambda: starting(lambda w: None), "initial_weights of mine .* got None"),
        "start NaN": (
            lambda: starting(lambda w: tuple(x * NAN for x in w)),
            "initial_weights of mine has a NaN or an infinity in weight 0",
        ),
        "start inf": (
            lambda: starting(lambda w: (w[0], w[1] + tf.constant(np.inf))),
            "infinity in weight 1",
        ),
    }
)
def test_a_wrong_result_of_another_function_is_refused(wrong, words):
    text = told(wrong())
    assert re.search(words, text), text


def one_round(made, device, state=None):
    process = build(made)
    with device.installed():
        state = process.initialize()
        result = process.next(state, [to_tff(client) for client in CLIENTS])
    return result.state, result.metrics, process.get_model_weights(result.state).trainable


def test_numpy_and_python_values_are_converted(device_runtime):
    def client_update(setup, client):
        return output(
            setup,
            client,
            delta=[np.full(w.shape, 0.5) for w in client.weights],
            num_examples=3,
            metrics={"b": [1.0], "a": (np.float64(1), tf.constant(4))},
            sent=1.0,
        )

    made = method(
        client_update,
        initial_weights=lambda setup: [w.astype(np.float64) + 1 for w in START],
        server_state=lambda setup: {"z": 1.0, "y": (np.zeros(2, np.float32), 3)},
        server_update=lambda setup, state, sent: {"y": list(state["y"]), "z": state["z"] + sent},
    )
    state, metrics, weights = one_round(made, device_runtime)
    assert_weights_close(weights, [w + 1.5 for w in START])
    train = metrics["client_work"]["train"]
    assert (train["images_used"], train["b"], train["a"]) == (6.0, 2.0, 0.25)
    assert state.client_work["method"]["z"] == 3.0


def test_a_negative_number_of_images_is_rejected(device_runtime):
    """It would turn the update of the whole cohort round. Here one client of two sends it."""

    def client_update(setup, client):
        images = client.labeled.reduce(0, lambda n, batch: n + tf.size(batch["y"]))
        return output(setup, client, num_examples=tf.where(images > 3, -5.0, 2.0))

    _, metrics, weights = one_round(method(client_update), device_runtime)
    assert_weights_close(weights, [w + 1 for w in START])
    assert metrics["client_work"]["train"]["rejected_clients"] == 1.0
    assert metrics["client_work"]["train"]["images_used"] == 2.0


def test_what_is_not_finite_at_the_server_changes_nothing(device_runtime):
    """Each part stays as it was, and its metric is 1; an infinity from the start may stay."""
    state, metrics, weights = one_round(
        method(
            sending(1.0),
            aggregate=lambda setup, clients: tuple(d[0] * NAN for d in clients.delta),
            server_state=lambda setup: {"a": 2.0, "n": 5},
            server_update=lambda setup, s, sent: {"a": s["a"] * NAN, "n": s["n"] + 1},
            server_training=lambda setup, server: tuple(w / 0.0 for w in server.weights),
        ),
        device_runtime,
    )
    assert_weights_equal(weights, START)
    assert dict(state.client_work["method"]) == {"a": 2.0, "n": 5}
    assert metrics["client_work"]["server_state_non_finite"] == 1
    assert metrics["finalizer"]["update_non_finite"] == 1
    assert metrics["finalizer"]["server_training_non_finite"] == 1


def test_what_is_finite_at_the_server_changes_it(device_runtime):
    state, metrics, weights = one_round(
        at_server(
            lambda setup, s, sent: {"best": s["best"], "sum": s["sum"] + sent},
            lambda setup: {"best": np.float32(np.inf), "sum": 0.0},
        ),
        device_runtime,
    )
    assert_weights_close(weights, [w + 1 for w in START])
    assert dict(state.client_work["method"]) == {"best": np.inf, "sum": 2.0}
    assert metrics["client_work"]["server_state_non_finite"] == 0
    assert metrics["finalizer"]["update_non_finite"] == 0


def make_config(*fields, frozen=True):
    return dataclasses.make_dataclass("Mine", [*fields, ("seed", int, 0)], frozen=frozen)


NO_SEED = dataclasses.make_dataclass("Mine", [], frozen=True)
NO_DEFAULT = dataclasses.make_dataclass("Mine", ["a", ("seed", int, 0)], frozen=True)
NO_ARGUMENT = make_config(("a", int, dataclasses.field(default=1, init=False)))


@cases(
    {
        "None": ({"client_update": None}, "^client_update of the method mine must be"),
        "text": ({"client_update": "x"}, "^client_update of the method mine must be"),
        "aggregate": ({"aggregate": "mean"}, "^aggregate of the method mine must be"),
        "initial_memory": ({"initial_memory": 3}, "^initial_memory of the method mine must be"),
        "reads_unlabeled": ({"reads_unlabeled": "no"}, "^reads_unlabeled of the method mine must"),
        "state alone": ({"server_state": same}, "server_state but no server_update"),
        "update alone": ({"server_update": same}, "server_update but no server_state"),
        "helpers alone": ({"choose_helpers": same}, "choose_helpers but no initial_memory"),
        "keyword": ({"name": "class"}, "^name must be no keyword of Python, got 'class'"),
        "config instance": ({"config_class": Config()}, "frozen dataclass, got Config"),
        "config int": ({"config_class": int}, "frozen dataclass, got <class 'int'>"),
        "not frozen": ({"config_class": make_config(frozen=False)}, "frozen=True. at Mine"),
        "no seed": ({"config_class": NO_SEED}, "Mine needs a field seed"),
        "no default": ({"config_class": NO_DEFAULT}, "Mine.a of the method mine needs a default"),
        "no argument": ({"config_class": NO_ARGUMENT}, "Mine.a of the method mine must be an arg"),
    }
)
def test_wrong_fields_of_a_method_are_refused_at_once(wrong, words):
    given = {"name": "mine", "config_class": Config, "client_update": output, **wrong}
    with pytest.raises(ValueError, match=words) as caught:
        algorithms.Method(**given)
    assert "\n" not in str(caught.value)


def test_a_default_may_come_from_a_factory():
    made = make_config(("sizes", dict, dataclasses.field(default_factory=dict)))
    assert algorithms.Method("mine", made, output).config_class is made


def test_a_callable_that_has_no_hash_is_a_function_of_a_method():
    class Update:
        __hash__ = None

        def __call__(self, setup, client):
            return output(setup, client)

    made = method(Update())
    assert isinstance(build(made), tff.learning.templates.LearningProcess)
    assert made in {made}
