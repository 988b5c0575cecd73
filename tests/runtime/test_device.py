"""The device runtime against TFF's C++ worker, NumPy, and its own promises."""

import asyncio
import collections
import concurrent.futures
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client, to_tff

import tff_fedlabel
from tff_fedlabel import algorithms, augmentation, models, runtime
from tff_fedlabel.datasets import federated
from tff_fedlabel.runtime import _private_tensorflow, _rounds, device

SGD = tff.learning.optimizers.build_sgdm(0.1)
SPEC = collections.OrderedDict(
    x=tf.TensorSpec([None, 4], tf.float32), y=tf.TensorSpec([None], tf.int32)
)


@pytest.fixture(scope="module")
def local():
    """The worker, as the second path."""
    with runtime.local.start() as backend:
        yield backend


@pytest.fixture(scope="module")
def here():
    with runtime.device.start() as backend:
        yield backend


def in_context(backend):
    return tff.framework.get_context_stack().install(backend.context)


def rounds(backend, process, clients, number=5):
    with in_context(backend):
        state = process.initialize()
        for _ in range(number):
            output = process.next(state, clients)
            state = output.state
        return process.get_model_weights(state), output.metrics


def assert_same(found, expected, rtol=1e-5):
    tf.nest.assert_same_structure(found, expected)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert type(a) is type(b) and np.shape(a) == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.fixture(scope="module")
def clients():
    return [to_tff(random_client(seed)) for seed in range(5)]


def build_ours(name):
    configs = {
        "fedlabel": tff_fedlabel.FedLabelConfig(strong_augment=None),
        "fedprox": algorithms.FedProxConfig(proximal_strength=0.3),
    }
    return algorithms.ALGORITHMS[name](
        build_model(initial_weights()), SGD, *([configs[name]] if name in configs else [])
    )


@pytest.mark.parametrize("name", ["fedlabel", "fedavg", "fedprox"])
def test_our_processes_give_the_workers_weights(name, local, here, clients):
    process = build_ours(name)
    assert_same(rounds(here, process, clients), rounds(local, process, clients))


def model_fn():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input([4]),
            tf.keras.layers.Dense(
                3, kernel_initializer=tf.keras.initializers.GlorotUniform(seed=3)
            ),
        ]
    )
    return tff.learning.models.from_keras_model(
        model,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=SPEC,
        metrics=[tf.keras.metrics.SparseCategoricalAccuracy()],
    )


def keras_clients(number=5):
    rng = np.random.default_rng(0)
    sizes = [12, 3, 7, 12, 1][:number]
    return [
        tf.data.Dataset.from_tensor_slices(
            collections.OrderedDict(
                x=rng.normal(size=(n, 4)).astype(np.float32),
                y=rng.integers(3, size=n).astype(np.int32),
            )
        ).batch(5)
        for n in sizes
    ]


LEARNING = tff.learning
TFFS_OWN = {
    "fed_avg": lambda: LEARNING.algorithms.build_weighted_fed_avg(model_fn, SGD),
    "fed_prox": lambda: LEARNING.algorithms.build_weighted_fed_prox(model_fn, 0.1, SGD),
    "fed_eval": lambda: LEARNING.algorithms.build_fed_eval(model_fn),
    "zeroing, clipping": lambda: LEARNING.algorithms.build_weighted_fed_avg(
        model_fn, SGD, model_aggregator=LEARNING.robust_aggregator()
    ),
    "compression": lambda: LEARNING.algorithms.build_weighted_fed_avg(
        model_fn, SGD, model_aggregator=LEARNING.compression_aggregator()
    ),
}


@pytest.mark.parametrize("name", TFFS_OWN)
def test_tffs_own_processes_with_keras_variables(name, local, here):
    """Their graphs own variables, and several clients are computed at once."""
    process = TFFS_OWN[name]()
    found = rounds(here, process, keras_clients(), 2)
    assert_same(found, rounds(local, process, keras_clients(), 2))


def test_differential_privacy_adds_its_noise(here):
    def build(noise):
        return LEARNING.algorithms.build_unweighted_fed_avg(
            model_fn, SGD, model_aggregator=LEARNING.dp_aggregator(noise, clients_per_round=5)
        )

    exact, noisy = (rounds(here, build(n), keras_clients(), 1)[0] for n in (1e-9, 0.4))
    assert np.abs(noisy.trainable[0] - exact.trainable[0]).max() > 0.01


def test_what_cannot_run_is_refused_by_name(here):
    secure = LEARNING.algorithms.build_weighted_fed_avg(
        model_fn, SGD, model_aggregator=LEARNING.secure_aggregator()
    )

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def at_clients(x):
        return tff.federated_map(tff.tensorflow.computation(lambda v: v + 1), x)

    @tff.federated_computation
    def nobody():
        return tff.federated_sum(tff.federated_value(1, tff.CLIENTS))

    with in_context(here):
        state = secure.initialize()
        with pytest.raises(runtime.UnsupportedComputationError, match="federated_secure_sum"):
            secure.next(state, keras_clients())
        with pytest.raises(runtime.UnsupportedComputationError, match="values of clients"):
            at_clients([1, 2])
        with pytest.raises(runtime.UnsupportedComputationError, match="number of clients"):
            nobody()


def test_other_federated_computations(here):
    @tff.federated_computation(
        tff.FederatedType(np.float32, tff.CLIENTS), tff.FederatedType(np.float32, tff.SERVER)
    )
    def statistics(values, offset):
        at_clients = tff.federated_broadcast(offset)
        add = tff.tensorflow.computation(lambda a, b: a + b)
        shifted = tff.federated_map(add, (values, at_clients))
        return collections.OrderedDict(
            mean=tff.federated_mean(shifted), sum=tff.federated_sum(values), offset=offset
        )

    with in_context(here):
        assert statistics([1.0, 2.0, 6.0], 10.0) == {"mean": 13.0, "sum": 9.0, "offset": 10.0}
        assert statistics([4.0], 0.0)["mean"] == 4.0
        with pytest.raises(TypeError, match="does not match type float32"):
            statistics([np.zeros(3, np.float32)], 0.0)


def test_tensorflow_computations(here):
    @tff.tensorflow.computation(tff.SequenceType(np.int32))
    def total(numbers):
        return numbers.reduce(0, lambda a, b: a + b)

    @tff.tensorflow.computation(np.int64)
    def count_up(limit):
        return tf.data.Dataset.range(limit)

    @tff.tensorflow.computation(np.str_)
    def shout(word):
        return tf.strings.join([word, "!"])

    @tff.tensorflow.computation
    def seeded():
        return tf.random.uniform([3], seed=4)

    @tff.federated_computation(np.str_)
    def both(word):
        return shout(word), seeded()

    with in_context(here):
        assert total([1, 2, 3]) == 6
        assert total([]) == 0
        assert total(tf.data.Dataset.range(5, output_type=tf.int32)) == 10
        assert [int(x) for x in count_up(3)] == [0, 1, 2]
        assert shout("a") == b"a!"
        # Every call of a TFF computation starts afresh.
        np.testing.assert_array_equal(seeded(), seeded())
        np.testing.assert_array_equal(both("b")[1], seeded())
        with pytest.raises(TypeError, match="does not match type int32"):
            total(tf.data.Dataset.range(5))


def test_variables_start_afresh_and_are_not_shared(here):
    """Clients that count in a variable, several at once, each from 0."""

    @tff.tensorflow.computation(np.int32)
    def count(limit):
        counter = tf.Variable(0)

        @tf.function
        def loop():
            for _ in tf.range(limit):
                counter.assign_add(1)
            return counter.read_value()

        return loop()

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def count_all(limits):
        return tff.federated_sum(tff.federated_map(count, limits))

    limits = list(range(1, 40))
    with in_context(here):
        for _ in range(3):
            assert count_all(limits) == sum(limits)


def test_runs_repeat_themselves_bit_for_bit_however_many_at_once(clients):
    process = build_ours("fedlabel")
    seen = []
    for number in (1, 4, 4):
        with runtime.device.start(max_concurrent_clients=number) as backend:
            seen.append(rounds(backend, process, clients, 3))
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


def test_empty_cohort_keeps_the_weights(here):
    process = build_ours("fedavg")
    with in_context(here):
        state = process.initialize()
        after = process.next(state, []).state
        assert_same(process.get_model_weights(after), process.get_model_weights(state), rtol=0)


def test_train_model_runs_in_it(clients, tmp_path):
    process = build_ours("fedavg")
    element = process.next.type_signature.parameter[1].member

    class Iterator(tff.program.FederatedDataSourceIterator):
        federated_type = tff.FederatedType(element, tff.CLIENTS)

        @classmethod
        def from_bytes(cls, data):
            return cls()

        def to_bytes(self):
            return b""

        def select(self, k=None):
            return clients[:k]

    class Source(tff.program.FederatedDataSource):
        federated_type = Iterator.federated_type

        def iterator(self):
            return Iterator()

    class Keep(tff.program.ReleaseManager):
        def __init__(self):
            self.released = {}

        async def release(self, value, key):
            self.released[key] = await tff.program.materialize_value(value)

    weights, metrics = Keep(), Keep()

    with runtime.use("device", asynchronous=True):
        asyncio.run(
            tff.learning.programs.train_model(
                train_process=process,
                train_data_source=Source(),
                train_per_round_clients=5,
                train_total_rounds=3,
                program_state_manager=tff.program.FileProgramStateManager(str(tmp_path)),
                model_output_manager=weights,
                train_metrics_manager=metrics,
                evaluation_manager=None,
                evaluation_periodicity=1,
            )
        )
    with runtime.use("device"):
        expected = process.initialize()
        for _ in range(3):
            expected = process.next(expected, clients).state
        expected = process.get_model_weights(expected)
    (last,) = list(weights.released.values())[-1:]
    assert_same(last.global_model_weights.trainable, expected.trainable, rtol=0)
    assert {1, 2, 3} <= set(metrics.released)


def test_lists_of_batches_of_several_shapes(here):
    element = tff.types.tensorflow_to_type(
        collections.OrderedDict(b=tf.TensorSpec([None], tf.float32), a=tf.TensorSpec([], tf.int32))
    )

    @tff.tensorflow.computation(tff.SequenceType(element))
    def last(batches):
        start = (tf.constant(0.0), tf.constant(0))
        step = lambda s, e: (s[0] + tf.reduce_sum(e["b"]), s[1] * 10 + e["a"])  # noqa: E731
        return batches.reduce(start, step)

    batches = [
        collections.OrderedDict(b=np.ones(n, np.float32), a=np.int32(n)) for n in (3, 3, 1, 4)
    ]
    with in_context(here):
        assert tuple(last(batches)) == (11.0, 3314)


def test_seeded_shuffles_start_again_in_every_call(here, local):
    @tff.tensorflow.computation(tff.SequenceType(tff.TensorType(np.int64)))
    def read(numbers):
        return numbers.reduce(np.int64(0), lambda read, number: 10 * read + number)

    @tff.federated_computation(tff.FederatedType(read.type_signature.parameter, tff.CLIENTS))
    def read_all(clients):
        return tff.federated_sum(tff.federated_map(read, clients))

    def numbers():
        return tf.data.Dataset.range(1, 9)

    def digit(x):
        return 1 + x % 9

    def make():
        inner = numbers().shuffle(8, seed=5)
        twice = numbers().shuffle(8, seed=1).map(lambda x: x + 1).shuffle(4, seed=2)
        return [
            numbers(),
            numbers().shuffle(8, seed=1),
            twice.batch(3).unbatch(),
            numbers().cache().shuffle(8, seed=3, reshuffle_each_iteration=False),
            tf.compat.v1.data.Dataset.range(1, 9).shuffle(8, seed=1),
            numbers().take(2).flat_map(lambda _: inner.take(3)),
            tf.data.Dataset.random(seed=4, rerandomize_each_iteration=True).take(6).map(digit),
        ]

    # A new dataset starts from its seed: read here, once each.
    orders = [[int(number) for number in dataset] for dataset in make()]
    values = [int("".join(map(str, order))) for order in orders]
    assert orders[0] == list(range(1, 9)) and orders[0] != orders[1]
    datasets = make()
    for backend in (local, here):
        with in_context(backend):
            for _ in range(3):
                assert read_all(datasets) == sum(values)
                assert [read(dataset) for dataset in datasets] == values

    def count():
        yield from range(1, 9)

    generated = tf.data.Dataset.from_generator(
        count, output_signature=tf.TensorSpec([], tf.int64)
    ).shuffle(8, seed=1)
    tables = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.range(9, dtype=tf.int64), tf.range(9)), -1
    )
    looked_up = numbers().map(lambda x: tf.cast(tables[x], tf.int64)).shuffle(8, seed=1)
    with in_context(here):
        assert read(generated) == read(generated) == values[1]
        assert read(looked_up) == read(looked_up) == values[1]


def test_ready_computations_do_not_wait_for_one_that_is_compiled(here, monkeypatch):
    @tff.tensorflow.computation(np.int32)
    def double(x):
        return 2 * x

    @tff.tensorflow.computation(np.int32)
    def slow(x):
        return 3 * x

    compiling, ready = threading.Event(), threading.Event()
    compile_computation = device.compile_computation

    def compile_slowly(comp):
        compiling.set()
        assert ready.wait(30)
        return compile_computation(comp)

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


def test_numbers_that_do_not_fit_are_refused(here):
    def identity(dtype):
        @tff.tensorflow.computation(tff.TensorType(dtype, [None]))
        def same(x):
            return x + 0 if dtype is not np.bool_ else tf.identity(x)

        return same

    refused = [
        (np.int32, [2**40]),
        (np.int32, np.array([2**33 + 5])),
        (np.int32, np.array([1.0])),
        (np.int32, [np.nan]),
        (np.uint8, [300]),
        (np.uint8, [-1]),
        (np.float32, [1e300]),
        (np.float16, [1e6]),
        (np.bool_, np.array([2])),
    ]
    with in_context(here):
        for dtype, value in refused:
            with pytest.raises(TypeError, match="does not match type "):
                identity(dtype)(value)
        for dtype, value in [
            (np.int32, np.array([-5], np.int64)),
            (np.uint8, [255]),
            (np.float32, np.array([0.1, np.inf])),
            (np.float32, [3]),
            (np.int32, []),
        ]:
            found = identity(dtype)(value)
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, np.asarray(value).astype(dtype))


def test_elements_are_not_swapped(here):
    """TensorFlow orders dictionaries by name, named tuples by position."""
    point, reverse = (collections.namedtuple("Point", names) for names in ("x y", "y x"))
    x, y = np.arange(3), 100 * np.arange(3)

    def sums(*names):
        element = collections.OrderedDict((name, np.int64) for name in names)

        @tff.tensorflow.computation(tff.SequenceType(element))
        def add_up(points):
            return points.reduce(
                (np.int64(0), np.int64(0)), lambda s, p: (s[0] + p["x"], s[1] + p["y"])
            )

        return add_up

    datasets = tf.data.Dataset.from_tensor_slices
    with in_context(here):
        for _ in range(2):  # whatever was seen before
            assert sums("x", "y")(datasets(point(x=x, y=y))) == (3, 300)
            assert sums("x", "y")(datasets(collections.OrderedDict(x=x, y=y))) == (3, 300)
            assert sums("y", "x")(datasets(collections.OrderedDict(y=y, x=x))) == (3, 300)
            for names in (("x", "y"), ("y", "x")):
                with pytest.raises(TypeError, match="does not match type "):
                    sums(*names)(datasets(reverse(y=y, x=x)))
            both = sums("x", "y")
            assert both(datasets(point(x=x, y=y))) == (3, 300)
            with pytest.raises(TypeError, match="does not match type "):
                both(datasets(reverse(y=y, x=x)))


def test_the_failing_client_says_why(here):
    @tff.tensorflow.computation(tff.SequenceType(np.int64))
    def read(numbers):
        return numbers.reduce(np.int64(0), lambda a, b: a + b)

    @tff.federated_computation(tff.FederatedType(read.type_signature.parameter, tff.CLIENTS))
    def read_all(clients):
        return tff.federated_sum(tff.federated_map(read, clients))

    good = tf.data.Dataset.range(20_000)
    bad = tf.data.Dataset.range(8).map(lambda x: x // (x - 5))
    with runtime.device.start(max_concurrent_clients=4) as backend, in_context(backend):
        for place in range(4):
            for _ in range(3):
                clients = [good, good, good]
                clients.insert(place, bad)
                with pytest.raises(runtime.ComputationError, match="division by zero"):
                    read_all(clients)


def test_tables_start_empty_and_nothing_is_kept(here):
    @tff.tensorflow.computation(np.int64)
    def size_after(key):
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
        with tf.control_dependencies([table.insert(key, key)]):
            return table.size()

    with in_context(here):
        assert [size_after(key) for key in (1, 2, 3)] == [1, 1, 1]


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


def test_errors(here):
    @tff.tensorflow.computation(np.int32)
    def fail(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 3, message="too much")]):
            return tf.identity(x)

    with in_context(here):
        assert fail(1) == 1
        with pytest.raises(runtime.ComputationError, match="too much"):
            fail(5)
    with runtime.use("device"):
        context = tff.framework.get_context_stack().current
    with pytest.raises(runtime.ComputationError, match="has ended"):
        context.invoke(fail, 1)


@pytest.mark.parametrize(
    "options",
    [{"max_concurrent_clients": 0}, {"max_concurrent_clients": True}, {"require_gpu": 1}],
)
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        runtime.use("device", **options)


def test_no_gpu_is_an_error_where_one_is_required():
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("this machine has a GPU")
    with (
        pytest.raises(runtime.DeviceError, match="no GPU is visible"),
        runtime.use("device", require_gpu=True),
    ):
        pass


def test_placement_report():
    counts = collections.Counter(GPU=30, CPU=10)
    assert "75% on GPU, 25% on CPU" in device.placement_report(counts)


def test_the_next_client_is_measured_where_that_is_asked_for(clients):
    process = build_ours("fedavg")
    with runtime.device.start() as backend:
        expected, _ = rounds(backend, process, clients, 1)
        assert backend.placement is None and backend.operations is None
        backend.measure_placement()
        found, _ = rounds(backend, process, clients, 1)
        assert_same(found, expected, rtol=0)
        operations = backend.operations
        assert {operation.device for operation in operations} == {"CPU:0"}
        assert all(number > 0 for number in operations.values())
        assert backend.placement == {"CPU": sum(operations.values())}
        types = {operation.op for operation in operations}
        assert "AnonymousIteratorV3" in types and any("MatMul" in op for op in types)
        assert not {"Const", "Identity", "_Arg", "_Retval"} & types


def test_operations_are_counted_by_place_and_type(here):
    """Against the graph of a function whose operations nothing rewrites."""

    @tf.function
    def function(x):
        words = tf.strings.unicode_encode(tf.cast(x, tf.int32)[None], "UTF-8")
        return tf.linalg.det(tf.linalg.inv(tf.reshape(x, [2, 2]))), words

    _, counts = _private_tensorflow.operations_by_device(
        lambda: function(tf.constant([1.0, 2.0, 3.0, 4.0]))
    )
    of_type = {operation.op: (operation, number) for operation, number in counts.items()}
    assert of_type["MatrixInverse"][1] == of_type["MatrixDeterminant"][1] == 1
    assert of_type["MatrixInverse"][0] == ("CPU:0", "MatrixInverse", "GPU kernel")
    assert of_type["UnicodeEncode"][0] == ("CPU:0", "UnicodeEncode", "no GPU kernel")
    assert _private_tensorflow.by_kind(counts) == {"CPU": sum(counts.values())}
    _, counts = _private_tensorflow.operations_by_device(
        lambda: function(tf.constant([1.0, 2.0, 3.0, 4.0]))
    )
    assert not counts  # it ran before


def test_a_required_gpu_without_the_clients_operations_is_an_error(clients):
    process = build_ours("fedavg")
    with runtime.device.start() as backend:
        backend.measure_placement()
        backend._require_gpu = True
        for _ in range(2):
            with pytest.raises(runtime.DeviceError, match="a GPU is required, .* 100% on CPU"):
                rounds(backend, process, clients, 1)


def cnn_round(backend_name):
    """One FedLabel round of the CNN on fixed images, from its initial weights."""
    rng = np.random.default_rng(0)
    data = federated.from_arrays(
        rng.integers(256, size=(60, 8, 8, 1), dtype=np.uint8).astype(np.uint8),
        rng.integers(10, size=60).astype(np.int32),
        np.arange(60) % 3,
        np.arange(60) % 2 == 0,
        num_classes=10,
    )
    process = tff_fedlabel.build_fedlabel(
        models.functional_model(
            lambda: models.build_keras("cnn", input_shape=(8, 8, 1), num_classes=10, seed=0),
            input_shape=(8, 8, 1),
        ),
        tff.learning.optimizers.build_sgdm(0.05),
        tff_fedlabel.FedLabelConfig(threshold=0.1, strong_augment=augmentation.WeakAugment()),
    )
    cohort = [
        data.client_dataset(i, 0, labeled_steps=2, unlabeled_steps=2, batch_size=8)
        for i in data.client_ids
    ]
    with runtime.use(backend_name):
        state = process.next(process.initialize(), cohort).state
        return process.get_model_weights(state).trainable


_SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
import numpy as np
import test_device
from tff_fedlabel import runtime
found, expected = (test_device.cnn_round(name) for name in ("device", "local"))
for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
with runtime.device.start() as backend:
    assert len(backend.devices) == 2, backend.devices
    process = test_device.build_ours("fedavg")
    clients = [test_device.to_tff(test_device.random_client(seed)) for seed in range(5)]
    weights, _ = test_device.rounds(backend, process, clients, 2)
    np.savez(sys.argv[1], *weights.trainable)

# A process that was built before op determinism was on, on "GPUs" that are CPU:1 alone: what
# TensorFlow refuses there goes to CPU:0.
from tff_fedlabel.runtime import _private_tensorflow
count = _private_tensorflow.operations_by_device
process = test_device.build_ours("fedlabel")
with runtime.device.start() as backend:
    (before, _), operations = count(lambda: test_device.rounds(backend, process, clients, 2))
    # Each client's graph was run on both.
    devices = {{o.device for o in operations if "MatMul" in o.op}}
    assert devices == {{"CPU:0", "CPU:1"}}, operations
with runtime.device.start(deterministic=True) as backend:
    backend._rounds.devices, backend._on_gpu = backend.devices[1:], True
    (after, _), operations = count(lambda: test_device.rounds(backend, process, clients, 2))
    refused = "SparseSoftmaxCrossEntropyWithLogits"
    assert {{o.device for o in operations if o.op == refused}} == {{"CPU:0"}}, operations
    assert {{o.device for o in operations if "MatMul" in o.op}} == {{"CPU:1"}}, operations
for a, b in zip(before.trainable, after.trainable, strict=True):
    np.testing.assert_array_equal(a, b)
print("done")
"""


def test_cnn_round_and_several_devices(here, clients, tmp_path):
    """In a process of its own: two logical CPU devices, and oneDNN off in both runtimes."""
    tests = os.path.dirname(__file__)
    root = os.path.dirname(os.path.dirname(tests))
    paths = [root, tests, os.path.join(tests, os.pardir, "algorithms")]
    output = tmp_path / "output"
    with open(output, "w") as file:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT.format(paths=paths), tmp_path / "weights.npz"],
            env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
    assert done.returncode == 0 and "done" in output.read_text(), output.read_text()[-3000:]
    expected, _ = rounds(here, build_ours("fedavg"), clients, 2)
    found = np.load(tmp_path / "weights.npz")
    for name, weight in zip(found.files, expected.trainable, strict=True):
        np.testing.assert_allclose(found[name], weight, rtol=1e-5, atol=1e-6)
