"""The state between rounds, and the contexts that calls are made in."""

import asyncio
import collections
import collections.abc
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from computations import add_up

from tff_fedlabel import runtime
from tff_fedlabel.runtime import _graphs


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
