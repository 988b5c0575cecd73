"""What the device runtime computes at once: clients, calls, and who waits for whom."""

import asyncio
import concurrent.futures
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from device_rounds import build_ours, in_context, rounds

from tff_fedlabel import runtime
from tff_fedlabel.runtime import _rounds, device


def test_runs_repeat_themselves_bit_for_bit_however_many_at_once(clients):
    process = build_ours("fedlabel")
    seen = []
    for number, times in ((1, 1), (4, 2)):
        with runtime.device.start(max_concurrent_clients=number) as backend:
            seen += [rounds(backend, process, clients, 3) for _ in range(times)]
    for other in seen[1:]:
        for a, b in zip(tf.nest.flatten(seen[0]), tf.nest.flatten(other), strict=True):
            np.testing.assert_array_equal(a, b)


def test_clients_in_flight_are_bounded(monkeypatch):
    running, most, lock = [0], [0], threading.Lock()
    work = _rounds.Rounds._work

    def watched(self, *arguments):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.05)
        try:
            return work(self, *arguments)
        finally:
            with lock:
                running[0] -= 1

    monkeypatch.setattr(_rounds.Rounds, "_work", watched)

    @tff.federated_computation(tff.FederatedType(np.int64, tff.CLIENTS))
    def add_all(numbers):
        return tff.federated_sum(numbers)

    with runtime.use("device", max_concurrent_clients=3):
        assert add_all(list(range(12))) == 66
    assert 1 < most[0] <= 3
    most[0] = 0
    with runtime.use("device", max_concurrent_clients=1):
        assert add_all(list(range(12))) == 66
    assert most[0] == 1


def test_ready_computations_do_not_wait_for_one_that_is_compiled(here, monkeypatch):
    @tff.tensorflow.computation(np.int32)
    def double(x):
        return 2 * x

    @tff.tensorflow.computation(np.int32)
    def slow(x):
        return 3 * x

    compiling, ready = threading.Event(), threading.Event()
    compile_computation = device.compile_computation

    def compile_slowly(*arguments):
        compiling.set()
        assert ready.wait(30)
        return compile_computation(*arguments)

    def call_slow():
        with in_context(here):
            return slow(2)

    with in_context(here):
        assert double(1) == 2
        monkeypatch.setattr(device, "compile_computation", compile_slowly)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            result = pool.submit(call_slow)
            assert compiling.wait(30)
            assert double(2) == 4 and not result.done()
            ready.set()
            assert result.result(30) == 6


def test_the_failing_client_says_why(here):
    @tff.tensorflow.computation(tff.SequenceType(np.int64))
    def read(numbers):
        return numbers.reduce(np.int64(0), lambda a, b: a + b)

    @tff.federated_computation(tff.FederatedType(read.type_signature.parameter, tff.CLIENTS))
    def read_all(clients):
        return tff.federated_sum(tff.federated_map(read, clients))

    good = tf.data.Dataset.range(4_000)
    bad = tf.data.Dataset.range(8).map(lambda x: x // (x - 5))
    with runtime.device.start(max_concurrent_clients=4) as backend, in_context(backend):
        for place in range(4):
            for _ in range(3):
                clients = [good, good, good]
                clients.insert(place, bad)
                with pytest.raises(runtime.ComputationError, match="division by zero"):
                    read_all(clients)


def test_calls_do_not_cancel_each_other(here):
    @tff.tensorflow.computation(np.int64)
    def count(limit):
        return tf.while_loop(lambda i: i < limit, lambda i: [i + 1], [tf.constant(0, tf.int64)])[0]

    @tff.federated_computation(tff.FederatedType(np.int64, tff.CLIENTS))
    def count_all(limits):
        return tff.federated_sum(tff.federated_map(count, limits))

    async def main():
        with in_context(here):
            here.context.invoke(count_all, [1])
        steady = asyncio.create_task(here.async_context.invoke(count_all, [200_000] * 3))
        await asyncio.sleep(0.05)
        with pytest.raises(TypeError):
            await here.async_context.invoke(count_all, ["no number"])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(here.async_context.invoke(count_all, [10**12] * 5), 0.3)
        return await steady

    started = time.monotonic()
    assert asyncio.run(main()) == 600_000
    assert time.monotonic() - started < 60


def test_leaving_the_block_ends_what_other_threads_compute():
    @tff.tensorflow.computation(np.int64)
    def count(limit):
        return tf.while_loop(lambda i: i < limit, lambda i: [i + 1], [tf.constant(0, tf.int64)])[0]

    errors = []

    def call(backend):
        try:
            backend.context.invoke(count, 10**12)
        except runtime.ComputationError as error:
            errors.append(str(error))

    with runtime.device.start() as backend:
        thread = threading.Thread(target=call, args=[backend])
        thread.start()
        time.sleep(0.5)
    thread.join(30)
    assert len(errors) == 1 and "has ended" in errors[0]
