"""Several workers: whole rounds as on one, whatever happens to some of them on the way."""

import contextlib
import os
import signal
import threading

import linear_model
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from worker_processes import address, eventually, one_worker, running, within

from tff_fedlabel import algorithms, runtime
from tff_fedlabel.runtime import _worker

COHORTS = [
    [linear_model.to_tff(linear_model.random_client(seed, 4 + seed, 9)) for seed in seeds]
    for seeds in ((1, 2, 3, 4, 5), (6, 7))
]


class Gate:
    """Holds clients in the middle of their round until it is opened, and tells how many wait."""

    def __init__(self, folder):
        self._gate = os.path.join(folder, "open")
        self._folder = folder

    def __call__(self, images, seed=None, round_num=None):
        """Used as the augmentation of `process`, which therefore augments nothing."""
        mark = tf.strings.join([self._folder, "/arrived-", tf.strings.as_string(images[0, 0, 0])])
        with tf.control_dependencies([tf.io.write_file(tf.reshape(mark, []), "")]):
            # The pattern hangs on the counter, or TensorFlow would look but once.
            (count,) = tf.while_loop(
                lambda i: tf.equal(tf.size(tf.io.matching_files(self._pattern(i))), 0),
                lambda i: [i + 1],
                [0],
            )
        with tf.control_dependencies([count]):
            return tf.identity(images)

    def _pattern(self, i):
        return tf.strings.join([self._gate, tf.strings.substr(tf.strings.as_string(i), 0, 0)])

    def open(self):
        with open(self._gate, "w"):
            pass

    def close(self):
        for name in os.listdir(self._folder):
            os.remove(os.path.join(self._folder, name))

    def arrived(self):
        return len([name for name in os.listdir(self._folder) if name.startswith("arrived-")])


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return Gate(str(tmp_path_factory.mktemp("gate")))


@pytest.fixture(scope="module")
def process(gate):
    """FedLabel whose clients wait at the gate; an open one changes nothing."""
    return algorithms.build_fedlabel(
        linear_model.build_model(linear_model.initial_weights()),
        tff.learning.optimizers.build_sgdm(0.3),
        algorithms.FedLabelConfig(strong_augment=gate),
    )


def train(process):
    state = process.initialize()
    for cohort in COHORTS:
        output = process.next(state, cohort)
        state = output.state
    return process.get_model_weights(state).trainable, output.metrics["client_work"]["train"]


@pytest.fixture(scope="module")
def expected(process, gate, local_runtime):
    gate.open()
    with tff.framework.get_context_stack().install(local_runtime.context):
        weights, metrics = train(process)
    for before, after in zip(linear_model.initial_weights(), weights, strict=True):
        assert np.abs(before - after).max() > 1e-2
    return weights, metrics


def assert_equal(actual, expected):
    for a, e in zip(actual[0], expected[0], strict=True):
        np.testing.assert_allclose(a, e, atol=1e-5, rtol=0)
    assert actual[1].keys() == expected[1].keys()
    for name, value in actual[1].items():
        np.testing.assert_allclose(value, expected[1][name], atol=1e-5, rtol=1e-5, err_msg=name)


def test_fedlabel_on_three_workers_equals_the_local_runtime(addresses, process, gate, expected):
    gate.open()
    with runtime.use("workers", addresses=addresses) as handle:
        assert handle.name == "workers" and handle.processes == ()
        handle.check()
        first, second = train(process), train(process)
        assert handle.backend.lost == {}
    assert_equal(first, expected)
    for a, b in zip(first[0], second[0], strict=True):
        np.testing.assert_array_equal(a, b)  # it repeats itself bit for bit


def test_fedavg_on_three_workers_equals_the_local_runtime(addresses, local_runtime):
    process = algorithms.build_fedavg(
        linear_model.build_model(linear_model.initial_weights()),
        tff.learning.optimizers.build_sgdm(0.2),
        model_aggregator=tff.learning.robust_aggregator(zeroing=True, clipping=True, weighted=True),
    )
    with tff.framework.get_context_stack().install(local_runtime.context):
        expected = train(process)
    with runtime.use("workers", addresses=addresses):
        actual = train(process)
    assert_equal(actual, expected)


def test_the_clients_are_divided(addresses, process, gate, expected):
    """All five wait at the gate although a worker computes one client at a time."""
    with contextlib.ExitStack() as stack:
        own = [stack.enter_context(contextlib.closing(_worker.Worker(None, 1))) for _ in range(5)]
        for worker in own:
            worker.wait_until_ready(30)
        gate.close()
        with runtime.use("workers", addresses=[address(w.port) for w in own]) as handle:
            state = process.initialize()
            opener = threading.Thread(target=lambda: eventually(arrived_five) and gate.open())
            arrived_five = lambda: gate.arrived() == 5  # noqa: E731
            opener.start()
            within(60, lambda: handle.context.invoke(process.next, packed(state, COHORTS[0])))


def packed(state, cohort):
    return tff.structure.Struct.unnamed(state, cohort)


def hit_in_the_middle(process, gate, addresses, hit, **options):
    """Trains; `hit` is called in round one, when clients wait and none can have ended."""
    gate.close()
    seen = []

    def strike():
        if eventually(lambda: gate.arrived() >= len(addresses), 30):
            seen.append(gate.arrived())
            hit()
        gate.open()

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        with runtime.use("workers", addresses=addresses, **options) as handle:
            result = within(60, lambda: train_in(handle, process))
            lost = handle.backend.lost
    finally:
        striker.join()
    assert len(seen) == 1
    return result, lost


def train_in(handle, process):
    with tff.framework.get_context_stack().install(handle.context):
        return train(process)


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_dies_or_hangs_in_the_middle(addresses, process, gate, expected, end):
    with one_worker() as victim:
        result, lost = hit_in_the_middle(
            process,
            gate,
            [*addresses[:2], address(victim.port)],
            lambda: os.kill(victim.pid, signal.Signals[end]),
            heartbeat_timeout=2.0 if end == "SIGSTOP" else 60.0,
        )
        assert running(victim.pid) == (end == "SIGSTOP")
    assert_equal(result, expected)
    assert list(lost) == [address(victim.port)]
    if end == "SIGSTOP":
        assert "no heartbeat" in lost[address(victim.port)]


def test_no_attempt_is_left(process, gate, addresses, expected):
    with one_worker() as victim:
        with pytest.raises(runtime.WorkerError, match="lost in 1 attempt at the") as caught:
            hit_in_the_middle(
                process,
                gate,
                [addresses[0], address(victim.port)],
                lambda: os.kill(victim.pid, signal.SIGKILL),
                attempts=1,
            )
    assert f"{address(victim.port)} (UNAVAILABLE" in str(caught.value)
    assert addresses[0] not in str(caught.value) and "\n" not in str(caught.value)
