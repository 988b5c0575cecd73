"""What goes in and out of the runtimes: cohorts, datasets, and the state between rounds."""

import asyncio
import collections
import collections.abc
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import runtime
from tff_fedlabel.runtime import _graphs

NUMBERS = tff.SequenceType(np.int64)


@tff.tensorflow.computation(NUMBERS)
def add_up(numbers):
    @tf.function
    def loop():  # `Dataset.reduce` has its function optimized anew in each call: 6 ms
        total = tf.constant(0, tf.int64)
        for number in numbers:
            total += number
        return total

    return loop()


@tff.federated_computation(tff.FederatedType(NUMBERS, tff.CLIENTS))
def add_all(clients):
    return tff.federated_sum(tff.federated_map(add_up, clients))


class Cohort(collections.abc.Sequence):
    """Datasets 0..i for client i, made when they are asked for; it tells what was asked, and when.

    Attributes:
      threads: client -> name of the thread that asked.
      alive: The datasets made so far that somebody still holds.
      most: The largest number of them at a time.
    """

    def __init__(self, number, bad=None):
        self.number, self.bad = number, bad
        self.threads, self.alive, self.most = {}, weakref.WeakSet(), 0

    def __len__(self):
        return self.number

    def __getitem__(self, client):
        if client == self.bad:
            raise LookupError(f"client {client} has gone")
        if not 0 <= client < self.number:
            raise IndexError(client)
        self.threads[client] = threading.current_thread().name
        dataset = tf.data.Dataset.range(client + 1)
        self.alive.add(dataset)
        self.most = max(self.most, len(self.alive))
        return dataset

    def sum(self):
        """Of all numbers of all clients."""
        return int(sum(np.arange(client + 1).sum() for client in range(self.number)))


def test_the_device_runtime_asks_for_a_client_when_its_turn_comes():
    cohort = Cohort(40)
    with runtime.use("device", max_concurrent_clients=2):
        assert add_all(cohort) == cohort.sum()
        assert sorted(cohort.threads) == list(range(40))
        assert all(name.startswith("tff-device_") for name in cohort.threads.values())
        gc.collect()
        assert not cohort.alive and cohort.most <= 8, cohort.most


def test_any_sequence_of_clients_anywhere_in_the_arguments(local_runtime):
    pair = tff.FederatedType(tff.StructType([("a", NUMBERS), ("b", np.int64)]), tff.CLIENTS)
    weigh = tff.tensorflow.computation(
        lambda client, factor: client["b"]
        * factor
        * client["a"].reduce(np.int64(0), lambda a, b: a + b)
    )

    @tff.federated_computation(
        tff.FederatedType(NUMBERS, tff.CLIENTS),
        tff.StructType([("clients", pair), ("factor", tff.FederatedType(np.int64, tff.SERVER))]),
    )
    def both(first, second):
        factor = tff.federated_broadcast(second.factor)
        return (
            tff.federated_sum(tff.federated_map(add_up, first)),
            tff.federated_sum(tff.federated_map(weigh, (second.clients, factor))),
        )

    @tff.federated_computation(
        tff.FederatedType(NUMBERS, tff.CLIENTS), tff.FederatedType(np.int64, tff.CLIENTS)
    )
    def two_columns(first, second):
        return tff.federated_sum(tff.federated_map(add_up, first)), tff.federated_sum(second)

    class Pairs(collections.abc.Sequence):
        def __len__(self):
            return 5

        def __getitem__(self, i):
            if i >= 5:
                raise IndexError(i)
            return collections.OrderedDict(a=tf.data.Dataset.range(i), b=i)

    def check(context, sequences):
        with tff.framework.get_context_stack().install(context):
            for clients in (Cohort(5), tuple(Cohort(5)), collections.deque(Cohort(5))):
                assert add_all(clients) == Cohort(5).sum()
            assert tuple(two_columns(Cohort(5), range(5))) == (Cohort(5).sum(), 10)
            with pytest.raises(TypeError, match="must come as a list, or another sequence"):
                add_all(iter(Cohort(5)))
            if sequences:
                struct = collections.OrderedDict(clients=Pairs(), factor=10)
                expected = sum(10 * i * sum(range(i)) for i in range(5))
                assert tuple(both(Cohort(5), struct)) == (Cohort(5).sum(), expected)

    check(local_runtime.context, True)
    with runtime.use("device") as handle:
        # There a struct of several placements is no argument of a computation over clients.
        check(handle.context, False)


@pytest.mark.parametrize("number", [1, 4])
def test_what_goes_wrong_in_the_sequence_is_raised_as_it_is(number, local_runtime):
    with runtime.use("device", max_concurrent_clients=number):
        for bad in (0, 3, 7):
            with pytest.raises(LookupError, match=f"client {bad} has gone"):
                add_all(Cohort(8, bad))
        assert add_all(Cohort(3)) == Cohort(3).sum()
    with tff.framework.get_context_stack().install(local_runtime.context):
        with pytest.raises(LookupError, match="client 3 has gone"):
            add_all(Cohort(8, 3))


_MANY = """
import resource, sys, time
import numpy as np, tensorflow as tf, tensorflow_federated as tff
from tff_fedlabel import runtime
from tff_fedlabel.runtime import _rounds
sys.path.insert(0, {tests!r})
import test_clients_and_state as these

class Many(these.Cohort):
    def __getitem__(self, client):
        assert 0 <= client < self.number
        return np.full(20_000, client, np.int64)

@tff.federated_computation(tff.FederatedType((np.int64, [20_000]), tff.CLIENTS))
def add_first(clients):
    first = tff.tensorflow.computation(lambda numbers: numbers[0] + numbers[-1])
    return tff.federated_sum(tff.federated_map(first, clients))

seconds = {{}}
run = _rounds.Rounds._round
def timed(*arguments):
    start = time.thread_time()
    try:
        return run(*arguments)
    finally:
        seconds["driver"] = time.thread_time() - start
_rounds.Rounds._round = timed

with runtime.use("device", max_concurrent_clients=2):
    for _ in range(5):
        add_first(Many(100))
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    few = peak()
    assert add_first(Many(5000)) == 2 * sum(range(5000))
    print(few, peak(), 1e3 * seconds["driver"] / 5000)
"""


def test_thousands_of_clients_take_no_more_memory_than_a_hundred():
    """Each client has 160 kB of data, so all 5,000 would be 800 MB."""
    tests = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", _MANY.format(tests=tests)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(tests))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    few, many, driver = map(float, done.stdout.split())
    assert many < 1.1 * few, (few, many)
    assert driver < 0.5, f"{driver:.2f} ms of the driver's thread for each client"


def test_a_shuffled_dataset_has_one_order_however_often_it_is_read():
    @tff.tensorflow.computation(NUMBERS)
    def read_twice(numbers):
        def read(start):
            return numbers.take(3).reduce(start, lambda read, number: 1000 * read + number)

        return read(np.int64(0)), read(np.int64(0)), numbers.cardinality()

    @tff.federated_computation(tff.FederatedType(NUMBERS, tff.CLIENTS))
    def read_all(clients):
        return tff.federated_sum(tff.federated_map(read_twice, clients))

    def make():
        return tf.data.Dataset.range(1000).shuffle(1000, seed=1)

    first = [int(number) for number in make().take(3)]
    assert first[0] == 120
    value = int("".join(f"{number:03}" for number in first))
    shuffled, endless = make(), make().repeat()
    with runtime.use("device"):
        for _ in range(5):
            assert tuple(read_twice(shuffled)) == (value, value, 1000)
            assert tuple(read_twice(endless)) == (value, value, tf.data.INFINITE_CARDINALITY)
            assert tuple(read_all([shuffled, shuffled])) == (2 * value, 2 * value, 2000)


# State


def test_a_returned_array_is_not_converted_again(monkeypatch):
    counted = []
    convert = tf.convert_to_tensor
    state_type = tff.FederatedType(tff.StructType([("w", (np.float32, [3, 2]))]), tff.SERVER)

    def counting(value, *arguments, **options):
        counted.append(value)
        return convert(value, *arguments, **options)

    monkeypatch.setattr(_graphs.tf, "convert_to_tensor", counting)

    @tff.federated_computation(state_type, tff.FederatedType(np.float32, tff.CLIENTS))
    def step(state, clients):
        add = tff.tensorflow.computation(lambda s, c: collections.OrderedDict(w=s["w"] + c))
        return tff.federated_map(add, (state, tff.federated_sum(clients)))

    zeros = collections.OrderedDict(w=np.zeros((3, 2), np.float32))
    with runtime.use("device"):
        state = step(zeros, [])
        counted.clear()
        for _ in range(3):
            state = step(state, [])
        # TFF's own operations convert other things; none has the state's shape.
        assert not [value for value in counted if np.shape(value) == (3, 2)]

        changed = collections.OrderedDict(w=state["w"].copy())
        changed["w"][1, 1] = 5
        np.testing.assert_array_equal(step(changed, [1.0])["w"], [[1, 1], [1, 6], [1, 1]])
        np.testing.assert_array_equal(step(state, [1.0])["w"], np.ones((3, 2)))
        assert [value for value in counted if np.shape(value) == (3, 2)]
        with pytest.raises(ValueError, match="read-only"):
            state["w"][0, 0] = 1
        part = collections.OrderedDict(w=step(state, [2.0])["w"][::-1])  # a view, not the array
        np.testing.assert_array_equal(step(part, [1.0])["w"], np.full((3, 2), 3))


def test_arrays_of_every_type_come_back_as_they_went_in():
    rng = np.random.default_rng(0)
    with runtime.use("device"):
        for dtype in (np.bool_, np.int8, np.uint8, np.int32, np.int64, np.float16, np.float64):
            same = tff.tensorflow.computation(lambda x: tf.identity(x), (dtype, [2, None]))
            value = rng.integers(0, 2, (2, 3)).astype(dtype)
            for _ in range(2):
                found = same(value)
                assert found.dtype == dtype
                np.testing.assert_array_equal(found, value)
                value = found
            other = tff.tensorflow.computation(lambda x: x, (dtype, [3, None]))
            with pytest.raises(TypeError, match="shape"):
                other(value)
        word = tff.tensorflow.computation(lambda x: tf.identity(x), (np.str_, [2]))
        assert list(word(np.array(["a", "b"]))) == [b"a", b"b"]


def test_tensors_end_with_their_arrays():
    from tff_fedlabel.runtime import _kept_tensors

    same = tff.tensorflow.computation(lambda x: x + 1, (np.float32, [4]))
    before = len(_kept_tensors._kept)
    with runtime.use("device"):
        values = [same(np.zeros(4, np.float32)) for _ in range(5)]
        assert len(_kept_tensors._kept) == before + 5
        del values
        assert len(_kept_tensors._kept) == before


# Contexts


def test_clients_whose_first_member_is_an_empty_struct(local_runtime):
    member = collections.OrderedDict(
        none=collections.OrderedDict(), one=np.int32, deep=collections.OrderedDict(two=np.int32)
    )

    @tff.federated_computation(tff.FederatedType(tff.to_type(member), tff.CLIENTS))
    def total(clients):
        add = tff.tensorflow.computation(lambda c: c["one"] + 100 * c["deep"]["two"])
        return tff.federated_sum(tff.federated_map(add, clients))

    clients = [
        collections.OrderedDict(
            none=collections.OrderedDict(), one=i, deep=collections.OrderedDict(two=2 * i)
        )
        for i in range(4)
    ]

    async def program():
        return await total(clients).get_value()

    with runtime.use("device", asynchronous=True):
        assert asyncio.run(program()) == 6 + 100 * 12
    with tff.framework.get_context_stack().install(local_runtime.federated_context()):
        assert asyncio.run(program()) == 6 + 100 * 12


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["device", "local"])
def test_a_call_after_the_block_says_so_in_one_line(name, asynchronous):
    with runtime.use(name, asynchronous=asynchronous) as handle:
        current = tff.framework.get_context_stack().current
    errors = (runtime.WorkerError, runtime.ComputationError)

    async def program():
        with tff.framework.get_context_stack().install(current):
            with pytest.raises(errors, match="^this runtime has ended: ") as caught:
                add_up([1, 2])
            assert "\n" not in str(caught.value)
        with pytest.raises(errors, match="^this runtime has ended: "):
            await handle.async_context.invoke(add_up, [1, 2])

    asyncio.run(program())


def test_the_end_of_the_block_is_told_to_asynchronous_calls():
    @tff.tensorflow.computation(np.int64)
    def count(limit):
        return tf.while_loop(lambda i: i < limit, lambda i: [i + 1], [tf.constant(0, tf.int64)])[0]

    async def program():
        with runtime.use("device") as handle:
            work = asyncio.create_task(handle.async_context.invoke(count, 10**12))
            await asyncio.sleep(0.3)
        with pytest.raises(runtime.ComputationError, match="has ended"):
            await asyncio.wait_for(work, 30)

    asyncio.run(program())


def test_nothing_blocks_in_the_event_loop_of_an_asynchronous_call(local_runtime):
    slow = tff.tensorflow.computation(
        lambda limit: tf.while_loop(
            lambda i: i < limit, lambda i: [i + 1], [tf.constant(0, tf.int64)]
        )[0],
        np.int64,
    )

    async def program():
        ticks = 0
        work = asyncio.create_task(local_runtime.async_context.invoke(slow, 500_000))
        while not work.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks, await work

    started = time.monotonic()
    ticks, result = asyncio.run(program())
    assert result == 500_000
    assert ticks > 0.2 * (time.monotonic() - started) / 0.01


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_thread_enters_the_runtime_of_another(asynchronous):
    results = []

    def work(handle):
        before = tff.framework.get_context_stack().current
        with handle.installed() as entered:
            assert entered is handle

            async def program():
                return await add_up([1, 2, 3]).get_value()

            results.append(asyncio.run(program()) if asynchronous else add_up([1, 2, 3]))
        assert tff.framework.get_context_stack().current is before
        results.append("left")

    with runtime.use("device", asynchronous=asynchronous) as handle:
        thread = threading.Thread(target=work, args=[handle])
        thread.start()
        thread.join(60)
    assert results == [6, "left"]


def test_select_is_refused_by_name():
    select = tff.tensorflow.computation(
        lambda table, i: tf.gather(table, i), [(np.int32, [4]), np.int32]
    )

    @tff.federated_computation(
        tff.FederatedType((np.int32, [1]), tff.CLIENTS),
        tff.FederatedType(np.int32, tff.SERVER),
        tff.FederatedType((np.int32, [4]), tff.SERVER),
    )
    def selected(keys, max_key, table):
        found = tff.federated_select(keys, max_key, table, select)
        return tff.federated_sum(tff.federated_map(add_first, found))

    with runtime.use("device"):
        with pytest.raises(
            runtime.UnsupportedComputationError, match="cannot run federated_select"
        ):
            selected([[1], [2]], 4, [1, 2, 3, 4])


@tff.tensorflow.computation(tff.SequenceType(np.int32))
def add_first(values):
    return values.reduce(np.int32(0), lambda a, b: a + b)
