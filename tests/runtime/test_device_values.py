"""What the device runtime makes of values, data sets and variables."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from device_rounds import in_context


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


def test_tables_start_empty_and_nothing_is_kept(here):
    @tff.tensorflow.computation(np.int64)
    def size_after(key):
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
        with tf.control_dependencies([table.insert(key, key)]):
            return table.size()

    with in_context(here):
        assert [size_after(key) for key in (1, 2, 3)] == [1, 1, 1]
