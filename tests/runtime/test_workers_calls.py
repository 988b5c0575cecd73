"""Several workers: single calls, lost and new workers between them, what is refused."""

import asyncio
import concurrent.futures
import os
import threading
import time

import grpc
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from computations import CLIENT_FLOATS, count_slowly, square, sum_of_squares
from worker_processes import address, eventually, free_port, one_worker, within

from tff_fedlabel import runtime


@pytest.mark.parametrize("number", [1, 3])
def test_cohorts_of_every_size_and_calls_without_clients(addresses, number):
    @tff.federated_computation
    def clients():
        return tff.federated_sum(tff.federated_value(1, tff.CLIENTS))

    @tff.federated_computation(tff.FederatedType(np.float32, tff.SERVER), CLIENT_FLOATS)
    def shift(offset, values):
        squares = tff.federated_map(square, values)
        total = tff.federated_sum(values)
        return tff.federated_broadcast(offset), (squares, total)

    with runtime.use("workers", addresses=addresses[:number], default_num_clients=7):
        for size in (0, 1, 2, 3, 7):
            values = [np.float32(v) for v in range(size)]
            assert sum_of_squares(values) == sum(v * v for v in range(size))
        assert square(3.0) == 9.0
        assert clients() == 7
        offset, (squares, total) = shift(2.5, values)
        assert (offset, total, squares) == (2.5, 21, [v * v for v in range(7)])


def test_asynchronous_context_for_programs(addresses):
    values = [np.float32(v) for v in range(4)]

    async def program():
        results = sum_of_squares(values), sum_of_squares(values[:1]), square(4.0)
        return await tff.program.materialize_value(results)

    with runtime.use("workers", addresses=addresses, asynchronous=True):
        assert asyncio.run(program()) == (14.0, 0.0, 16.0)


def test_structures_can_be_streamed(addresses):
    @tff.tensorflow.computation(tff.to_type([np.float32, np.int32]))
    def swap(pair):
        return pair[1], pair[0]

    with runtime.use("workers", addresses=addresses, stream_structs=True):
        assert tuple(swap((2.5, 3))) == (3, 2.5)


def test_all_workers_die_and_one_comes_back():
    values = [np.float32(v) for v in range(4)]
    with one_worker() as first, one_worker() as second:
        ports = first.port, second.port
        with runtime.use("workers", addresses=[address(port) for port in ports]) as handle:
            assert sum_of_squares(values) == 14
            first.close()
            second.close()
            for call in (lambda: handle.context.invoke(square, 1.0), handle.check):
                with pytest.raises(runtime.WorkerError, match="no worker answers: ") as caught:
                    within(30, call)
                for port in ports:
                    assert f"{address(port)} (" in str(caught.value)
                assert "\n" not in str(caught.value)
            with one_worker(ports[1]):
                assert sum_of_squares(values) == 14
                handle.check()
                assert list(handle.backend.lost) == [address(ports[0])]


def test_a_worker_started_anew_between_calls():
    values = [np.float32(v) for v in range(4)]
    with one_worker() as worker:
        with runtime.use("workers", addresses=[address(worker.port)]) as handle:
            assert sum_of_squares(values) == 14
            worker.close()
            with one_worker(worker.port):
                for size in (3, 4):
                    assert sum_of_squares(values[:size]) == sum(v * v for v in values[:size])
            assert handle.backend.lost == {}


def test_addresses_where_nobody_answers(addresses):
    nobody = address(free_port())
    with runtime.use("workers", addresses=[nobody, addresses[0]], connect_timeout=1.0) as handle:
        assert sum_of_squares([np.float32(2), np.float32(3)]) == 13
        assert list(handle.backend.lost) == [nobody]
    message = f"no worker answers: {nobody} .UNAVAILABLE: .*Connection refused"
    with pytest.raises(runtime.WorkerError, match=message) as caught:
        with runtime.use("workers", addresses=[nobody], connect_timeout=0.5):
            pytest.fail("entered the block")
    assert "\n" not in str(caught.value)


def test_a_call_that_is_cancelled_does_not_hold_up_the_next():
    async def program(handle):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle.async_context.invoke(count_slowly, 10**12), 1.0)
        return await handle.async_context.invoke(square, 3.0)

    with one_worker() as worker:
        with runtime.use("workers", addresses=[address(worker.port)]) as handle:
            assert within(30, lambda: asyncio.run(program(handle))) == 9.0


def test_another_server_at_the_address():
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with runtime.use("workers", addresses=[address(port)]) as handle:
            with pytest.raises(runtime.WorkerError, match=f"{address(port)} .UNIMPLEMENTED: "):
                within(30, lambda: handle.context.invoke(square, 3.0))
    finally:
        server.stop(None)


def test_a_failing_computation_is_not_tried_again(addresses):
    @tff.tensorflow.computation(np.float32)
    def refuse(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 0.0, message="too large")]):
            return tf.identity(x)

    @tff.federated_computation(CLIENT_FLOATS)
    def refuse_all(values):
        return tff.federated_sum(tff.federated_map(refuse, values))

    with runtime.use("workers", addresses=addresses) as handle:
        with pytest.raises(runtime.ComputationError, match="too large"):
            refuse_all([np.float32(1)] * 3)
        assert handle.backend.lost == {}
        assert square(3.0) == 9.0


def test_what_cannot_be_divided_is_refused(addresses):
    @tff.federated_computation(CLIENT_FLOATS)
    def distance_from_mean(values):
        mean = tff.federated_broadcast(tff.federated_mean(values))
        subtract = tff.tensorflow.computation(lambda a, b: a - b)
        return tff.federated_mean(tff.federated_map(subtract, (values, mean)))

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def secure(values):
        return tff.federated_secure_sum(values, 10)

    values = [np.float32(1), np.float32(3)]
    with runtime.use("workers", addresses=addresses):
        with pytest.raises(ValueError, match="depends on the result of another") as caught:
            distance_from_mean(values)
        assert isinstance(caught.value, runtime.ComputationError)
        assert "\n" not in str(caught.value) and "use another runtime" in str(caught.value)
        with pytest.raises(ValueError, match=r"secure aggregation \(federated_secure_sum\)"):
            secure([1, 2])
        with pytest.raises(TypeError, match="must come as a list"):
            current_context().invoke(sum_of_squares, 5.0)
    with runtime.use("workers", addresses=addresses[:1]):
        assert distance_from_mean(values) == 0.0


def current_context():
    return tff.framework.get_context_stack().current


def test_nothing_piles_up_and_nothing_works_after_the_block(addresses):
    def held():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def use_it():
        with runtime.use("workers", addresses=addresses) as handle:
            square(1.0)
        return handle

    use_it()
    time.sleep(1)
    threads, files = held()
    for _ in range(4):
        handle = use_it()
    assert eventually(lambda: held()[0] <= threads and held()[1] <= files), (held(), threads, files)
    with pytest.raises(runtime.WorkerError, match="inside its `with` block"):
        handle.context.invoke(square, 1.0)
    with pytest.raises(runtime.WorkerError, match="inside its `with` block"):
        handle.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"addresses is \(\)"),
        ({"addresses": "10.0.0.2:8000"}, "addresses is '10.0.0.2:8000'"),
        ({"addresses": []}, r"addresses is \[\]"),
        ({"addresses": ["10.0.0.2"]}, "holds '10.0.0.2'; a worker's address is 'host:port'"),
        ({"addresses": ["http://a:80"]}, "holds 'http://a:80'"),
        ({"addresses": ["a:0"]}, "holds 'a:0'"),
        ({"addresses": ["a:65536"]}, "holds 'a:65536'"),
        ({"addresses": ["::1:80"]}, "holds '::1:80'"),
        ({"addresses": ["[::z]:80"]}, "holds"),
        ({"addresses": [7]}, "holds 7"),
        ({"addresses": ["a:80", "[::1]:80", "A:80"]}, "names 'A:80' twice"),
        ({"addresses": ["a:80"], "attempts": 0}, "attempts is 0"),
        ({"addresses": ["a:80"], "attempts": True}, "attempts is True"),
        ({"addresses": ["a:80"], "connect_timeout": 0}, "connect_timeout is 0"),
        ({"addresses": ["a:80"], "heartbeat_timeout": "1"}, "heartbeat_timeout is '1'"),
        ({"addresses": ["a:80"], "default_num_clients": -1}, "default_num_clients is -1"),
        ({"addresses": ["a:80"], "stream_structs": 1}, "stream_structs is 1"),
        ({"addresses": ["a:80"], "adresses": []}, "did you mean 'addresses'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        runtime.use("workers", **options)
    assert "\n" not in str(caught.value)
