"""Secure aggregation: every value of a client goes through secure sums, and training stays right.

Secure sums are simulated by the device runtime.
"""

import functools

import four_methods
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import initial_weights, random_client, to_tff
from test_contract import (
    NUMBERED,
    THREE_ROUNDS,
    WITHOUT_TWINS,
    build,
    mean,
    reference,
    start,
    train,
)
from weights import assert_weights_close, assert_weights_equal

from tff_fedlabel import algorithms, runtime
from tff_fedlabel.algorithms import _secure

learning = tff.learning
FEDAVG = algorithms.METHODS["fedavg"]
CAN = [m for m in WITHOUT_TWINS if not (m.server_state or m.initial_memory or m.aggregate)]


@functools.cache
def secure(method):
    """FedAvg has TFF's whole aggregator; the others leave out what makes it slow to compile."""
    whole = method is FEDAVG
    aggregator = learning.secure_aggregator(zeroing=whole, clipping=whole)
    return build(method, model_aggregator=aggregator)


@pytest.fixture(scope="module")
def simulated():
    with runtime.use("device", simulate_secure_aggregation=True) as handle:
        yield handle


@pytest.mark.parametrize("method", CAN, ids=lambda method: method.name)
def test_tffs_static_check_finds_no_sum_in_the_clear(method):
    tff.test.assert_contains_secure_aggregation(secure(method).next)
    tff.test.assert_not_contains_unsecure_aggregation(secure(method).next)
    if method is FEDAVG:  # The check can fail.
        tff.test.assert_contains_unsecure_aggregation(build(method).next)


@pytest.mark.parametrize("name", ["fedlabel", "fedavg"])
def test_three_rounds_are_those_of_plain_sums(simulated, name):
    method = algorithms.METHODS[name]
    with simulated.installed():
        weights, history, _ = train(secure(method), method, THREE_ROUNDS)
        for before, after in zip(initial_weights(), weights, strict=True):
            assert np.isfinite(after).all() and np.abs(after - before).max() > 1e-3
        if method is FEDAVG:  # `test_fedavg_equals_numpy...` compares it
            return
        plain_weights, plain_history, _ = train(build(method), method, THREE_ROUNDS)
    assert_weights_close(weights, plain_weights, atol=1e-5)
    for found, expected in zip(history, plain_history, strict=True):
        measured = found["train"].pop("secure_sum_measurements")
        assert [m["secure_upper_clipped_count"] for m in measured.values()] == [0]
        # Steps of 2**-11 at each client, divided by the images of all.
        assert list(found["train"]) == list(expected["train"])
        for name, value in expected["train"].items():
            assert found["train"][name] == pytest.approx(value, abs=1e-3), name
        for name in ("images_used", "rejected_clients"):
            assert found["train"][name] == expected["train"][name]


def test_fedavg_equals_numpy_and_tffs_own_bodies_of_the_intrinsics(simulated, local_runtime):
    process, weights = secure(FEDAVG), start()
    with simulated.installed():
        found, history, _ = train(process, FEDAVG, THREE_ROUNDS[:1])
    with local_runtime.installed():  # TFF's test backend: its bodies, on its own executor
        replaced = tff.backends.test.replace_secure_intrinsics_with_bodies(process.next)
        data = [to_tff(client) for _, client in THREE_ROUNDS[0]]
        output = replaced(process.initialize(), data)
    assert_weights_close(found, mean(weights, reference(weights, THREE_ROUNDS[0])))
    # `replaced` has no Python containers of its own.
    others = tf.nest.flatten(output["state"]["global_model_weights"]["trainable"])
    assert_weights_close(found, others, atol=1e-6)
    measured = tf.nest.flatten(output["metrics"]["client_work"])
    for a, b in zip(tf.nest.flatten(history[0]), measured, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_empty_cohorts_and_broken_clients_count_for_nothing(simulated):
    process = secure(FEDAVG)
    broken = random_client(7)
    broken[0][0][0][:] = np.nan
    nothing = [(0, random_client(5, 0, 0)), (1, random_client(6, 0, 0))]
    with simulated.installed():
        weights, history, _ = train(process, FEDAVG, [nothing])
        state = process.initialize()
        after = process.next(state, [to_tff(c) for _, c in nothing]).state
        without, _, _ = train(process, FEDAVG, [NUMBERED])
        beside, with_broken, _ = train(process, FEDAVG, [[*NUMBERED, (9, broken)]])
    assert_weights_equal(weights, [np.float32(w) for w in initial_weights()])
    assert_weights_equal(tf.nest.flatten(after.aggregator), tf.nest.flatten(state.aggregator))
    assert history[0]["train"]["images_used"] == 0.0
    assert_weights_close(beside, without, atol=1e-6)
    assert with_broken[0]["train"]["rejected_clients"] == 1.0
    assert with_broken[0]["train"]["images_used"] == 11 + 3 + 8


def test_methods_that_show_single_clients_are_refused():
    aggregator = learning.secure_aggregator(zeroing=False, clipping=False)
    for method, why in (
        (four_methods.AT_SERVER, "small_server_state cannot .* state at the server has no bounds"),
        (four_methods.WITH_MEMORY, "small_memory cannot .* each client's memory leaves"),
        (four_methods.OWN_AGGREGATION, "small_aggregation has its own aggregation, which sees"),
    ):
        with pytest.raises(ValueError, match=f"^model_aggregator must be .*{why}") as caught:
            build(method, model_aggregator=aggregator)
        assert "\n" not in str(caught.value)


def test_what_counts_as_secure():
    value, weight = tff.to_type(np.float32), tff.to_type(np.float32)
    secure_sum = tff.aggregators.SecureSumFactory(1.0)
    count = tff.aggregators.SecureSumFactory(1, 0)
    modular = tff.aggregators.SecureModularSumFactory(2**8)

    def is_secure(factory, *types):
        return _secure.is_secure(factory.create(*types).next)

    assert is_secure(tff.aggregators.MeanFactory(secure_sum, secure_sum), value, weight)
    assert is_secure(tff.aggregators.UnweightedMeanFactory(secure_sum, count), value)
    assert is_secure(modular, tff.to_type(np.int32))
    # The weights are summed in the clear.
    assert not is_secure(tff.aggregators.MeanFactory(secure_sum), value, weight)
    assert not is_secure(tff.aggregators.MeanFactory(), value, weight)


def test_what_the_user_chooses_for_metrics_stays():
    process = build(
        FEDAVG,
        model_aggregator=learning.secure_aggregator(zeroing=False, clipping=False),
        metrics_aggregator=learning.metrics.sum_then_finalize,
    )
    tff.test.assert_contains_unsecure_aggregation(process.next)
