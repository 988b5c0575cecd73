"""Cohorts of clients and their data sets, in and out of the runtimes."""

import asyncio
import collections
import collections.abc
import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from computations import NUMBERS, add_up

from tff_fedlabel import runtime


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


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("said", ["", "no more"])
def test_a_sequence_that_stops_early_is_named(number, said):
    """StopIteration would end a generator or be refused by a future, wherever it arrives."""

    class Stops(Cohort):
        def __getitem__(self, client):
            if client == 3:
                raise StopIteration(*filter(None, [said]))
            return super().__getitem__(client)

    async def program():
        return await add_all(Stops(8)).get_value()

    reason = "raised StopIteration for client 3 of 8" + (": no more;" if said else ";")
    with runtime.use("device", max_concurrent_clients=number):
        with pytest.raises(runtime.ComputationError, match=reason) as error:
            add_all(Stops(8))
        assert "\n" not in str(error.value)
        assert add_all(Cohort(3)) == Cohort(3).sum()
    with runtime.use("device", max_concurrent_clients=number, asynchronous=True):
        with pytest.raises(runtime.ComputationError, match=reason):
            asyncio.run(program())


_MANY = """
import resource, sys, time
import numpy as np, tensorflow as tf, tensorflow_federated as tff
from tff_fedlabel import runtime
from tff_fedlabel.runtime import _rounds
sys.path.insert(0, {tests!r})
from test_cohorts import Cohort

class Many(Cohort):
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
    assert add_first(Many(2000)) == 2 * sum(range(2000))
    print(few, peak(), 1e3 * seconds["driver"] / 2000)
"""


def test_thousands_of_clients_take_no_more_memory_than_a_hundred():
    """Each client has 160 kB of data, so all 2,000 would be 320 MB."""
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
    value = int("".join(f"{number:03}" for number in first))
    shuffled, endless = make(), make().repeat()
    with runtime.use("device"):
        for _ in range(5):
            assert tuple(read_twice(shuffled)) == (value, value, 1000)
            assert tuple(read_twice(endless)) == (value, value, tf.data.INFINITE_CARDINALITY)
            assert tuple(read_all([shuffled, shuffled])) == (2 * value, 2 * value, 2000)


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
