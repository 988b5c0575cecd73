"""How a client's batches are made: like tf.data's own, in every runtime, from many threads."""

import collections
import concurrent.futures
import os
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import runtime
from tff_fedlabel._validation import WrongTypeError
from tff_fedlabel.datasets import federated

N, CLIENTS, CLASSES = 120, 6, 5


def _arrays(shape=(4, 4, 3), dtype=np.uint8):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (N, *shape), np.uint8)
    x = x if dtype == np.uint8 else (x / 255).astype(dtype)
    return x, rng.integers(0, CLASSES, N), np.arange(N) % CLIENTS, rng.random(N) < 0.4


def _data(shape=(4, 4, 3), dtype=np.uint8):
    x, y, client_ids, labeled = _arrays(shape, dtype)
    return federated.from_arrays(x, y, client_ids, labeled, hidden_y=y)


OPTIONS = {"labeled_steps": 3, "unlabeled_steps": 2, "batch_size": 4, "unlabeled_batch_size": 5}


def _read(datasets):
    return [
        [{name: value.tolist() for name, value in batch.items()} for batch in part]
        for part in (dataset.as_numpy_iterator() for dataset in datasets.values())
    ]


def _found_rows(x, dataset):
    """Row numbers of a dataset's images, found by their values."""
    number = {image.tobytes(): row for row, image in enumerate(x)}
    return [number[image.tobytes()] for batch in dataset for image in batch["x"].numpy()]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(4, 4, 3), (7,)])
def test_datasets_are_those_of_tf_data(shape, dtype, hidden):
    x, y, _, _ = _arrays(shape, dtype)
    data = _data(shape, dtype)
    for steps in (None, 3):  # A last batch that is not full, and none.
        made = data.client_dataset(
            2,
            1,
            labeled_steps=steps,
            unlabeled_steps=steps,
            batch_size=4,
            unlabeled_batch_size=7,
            with_hidden_labels=hidden,
        )
        for part, size, fields in (("labeled", 4, "xy"), ("unlabeled", 7, "xy" if hidden else "x")):
            rows = _found_rows(x, made[part])
            columns = {"x": x[rows], "y": y[rows].astype(np.int32)}
            element = collections.OrderedDict((field, columns[field]) for field in fields)
            expected = tf.data.Dataset.from_tensor_slices(element).batch(size)
            assert made[part].element_spec == expected.element_spec
            assert list(made[part].element_spec) == list(fields)
            assert made[part].cardinality() == expected.cardinality()
            batches = zip(made[part], expected, strict=True)
            for a, b in batches:
                assert type(a) is type(b) and list(a) == list(b)
                for field in fields:
                    assert a[field].dtype == b[field].dtype
                    np.testing.assert_array_equal(a[field], b[field])


def test_datasets_can_be_worked_on_like_others():
    dataset = _data().client_dataset(0, 0, **OPTIONS)["labeled"]
    assert isinstance(dataset, tf.data.Dataset) and len(dataset) == 3
    changed = dataset.unbatch().map(lambda e: e["y"] + 1).shuffle(8, seed=1).repeat(2).batch(6)
    options = tf.data.Options()
    options.autotune.enabled = False
    found = sorted(np.concatenate(list(changed.with_options(options).as_numpy_iterator())))
    labels = np.concatenate([batch["y"] for batch in dataset.as_numpy_iterator()])
    assert found == sorted([*(labels + 1), *(labels + 1)])
    total = dataset.reduce(np.int64(0), lambda a, e: a + tf.shape(e["x"], tf.int64)[0])
    assert total == 12


def _serialized(dataset):
    variant = tf.data.experimental.to_variant(dataset)
    return len(tf.raw_ops.DatasetToGraphV2(input_dataset=variant).numpy())


def test_a_call_carries_only_the_images_of_its_batches():
    n = 20_000
    x = np.zeros((n, 16, 16, 3), np.uint8)  # 15 MB
    data = federated.from_arrays(x, np.arange(n) % 10, [0] * n, np.arange(n) % 2 == 0)
    batches = data.client_dataset(0, 0, labeled_steps=2, unlabeled_steps=3, batch_size=8)
    assert _serialized(batches["labeled"]) < 2 * 8 * (16 * 16 * 3 + 4) + 2000
    assert _serialized(batches["unlabeled"]) < 3 * 8 * 16 * 16 * 3 + 2000


def _resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_rounds():
    x = np.zeros((2000, 32, 32, 3), np.uint8)
    data = federated.from_arrays(x, np.arange(2000) % 10, [0] * 2000, np.arange(2000) % 2 == 0)

    def rounds(numbers):
        for number in numbers:  # 1 MB each
            batches = data.client_dataset(
                0, number, labeled_steps=10, unlabeled_steps=1, batch_size=32
            )
            assert sum(1 for _ in batches["labeled"]) == 10

    rounds(range(20))
    before = _resident_mb()
    rounds(range(20, 170))
    assert _resident_mb() - before < 50  # 150 MB were made


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_a_client_takes_little_more_memory_than_its_images():
    x = np.zeros((2000, 28, 28, 1), np.uint8)
    data = federated.from_arrays(x, np.arange(2000) % 10, [0] * 2000, np.arange(2000) % 2 == 0)

    def make(numbers):
        return [
            data.client_dataset(0, number, labeled_steps=1, unlabeled_steps=1, batch_size=10)
            for number in numbers
        ]

    kept = make(range(200))
    before = _resident_mb()
    kept += make(range(200, 2200))
    each = (_resident_mb() - before) * 1024 / 2000
    assert each < 24, f"{each:.1f} KB for 15.3 KB of images"  # 34 KB with stages of Python's


def _labels_and_pixels(dataset):
    return dataset.reduce(
        np.int64(0),
        lambda total, element: (
            total
            + tf.reduce_sum(tf.cast(element["y"], tf.int64)) * 1000
            + tf.reduce_sum(tf.cast(element["x"], tf.int64))
        ),
    )


@pytest.fixture(params=["local", "device"])
def context(request):
    with runtime.use(request.param):
        yield request.param


def test_runtimes_read_them(context):
    data = _data()
    spec = data.element_spec()
    sequence = tff.SequenceType(tff.types.tensorflow_to_type(spec["labeled"]))
    computation = tff.tensorflow.computation(_labels_and_pixels, sequence)

    @tff.federated_computation(tff.FederatedType(sequence, tff.CLIENTS))
    def total(clients):
        return tff.federated_sum(tff.federated_map(computation, clients))

    cohort = data.cohort(data.client_ids, 4, **OPTIONS)
    datasets = [client["labeled"] for client in cohort]
    batches = [batch for client in datasets for batch in client.as_numpy_iterator()]
    assert len(batches) == CLIENTS * 3
    expected = sum(int(b["y"].sum()) * 1000 + int(b["x"].sum(dtype=np.int64)) for b in batches)
    assert total(datasets) == expected


def test_cohort_is_a_sequence_of_client_datasets():
    data = _data()
    clients = [4, 0, np.int64(2), 0]
    cohort = data.cohort(clients, np.int64(3), seed=1, **OPTIONS)
    expected = [_read(data.client_dataset(c, 3, seed=1, **OPTIONS)) for c in clients]
    assert isinstance(cohort, collections.abc.Sequence) and isinstance(cohort, federated.Cohort)
    assert len(cohort) == 4 and cohort.client_ids == (4, 0, 2, 0) and cohort.round_num == 3
    assert [_read(client) for client in cohort] == expected
    assert _read(cohort[-2]) == _read(cohort[np.int64(2)]) == expected[2]
    part = cohort[3:0:-2]
    assert len(part) == 2 and part.client_ids == (0, 0) and isinstance(part, federated.Cohort)
    assert [_read(client) for client in part] == [expected[3], expected[1]]
    assert [_read(client) for client in reversed(cohort)] == expected[::-1]
    assert len(data.cohort([], 0, **OPTIONS)) == 0
    with pytest.raises(IndexError):
        cohort[4]


def test_cohort_cannot_be_changed():
    data = _data()
    clients = [4, 0]
    cohort = data.cohort(clients, 3, **OPTIONS)
    clients.append(1)
    assert len(cohort) == 2
    with pytest.raises(TypeError):
        cohort[0] = None
    with pytest.raises(AttributeError):
        cohort.client_ids = (1,)


def test_cohort_makes_an_item_when_it_is_asked_for(monkeypatch):
    data = _data()
    made = []
    original = federated.FederatedData._client_dataset

    def spy(self, client_id, *arguments):
        made.append((client_id, threading.get_ident()))
        return original(self, client_id, *arguments)

    monkeypatch.setattr(federated.FederatedData, "_client_dataset", spy)
    cohort = data.cohort([3, 1, 2], 0, **OPTIONS)
    assert cohort[1:] and not made
    first, second = cohort[1], cohort[1]
    assert [client for client, _ in made] == [1, 1] and first is not second
    thread = threading.Thread(target=lambda: cohort[2])
    thread.start()
    thread.join()
    assert made[-1][0] == 2 and made[-1][1] != threading.get_ident()


def test_cohort_may_be_read_by_many_threads():
    # Sizes that nothing else here has: whatever is made once for all is made under the test.
    data = _data(shape=(3, 5, 1))
    cohort = data.cohort(data.client_ids * 8, 2, **OPTIONS)
    barrier = threading.Barrier(8)

    def read(first):
        barrier.wait()
        return {k: _read(cohort[k]) for k in range(first, len(cohort), 8)}

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(read, range(8)))
    found = {k: value for part in parts for k, value in part.items()}
    assert [found[k] for k in range(len(cohort))] == [_read(client) for client in cohort]


def test_clients_are_made_while_all_of_tensorflows_threads_are_busy():
    # Otherwise a thread that makes its next client waits behind other clients' training.
    data = _data()
    cohort = data.cohort(data.client_ids, 2, **OPTIONS)
    free, watchdog_rang = threading.Event(), []

    def hold():
        free.wait(120)
        return np.int64(0)

    @tf.function
    def busy():
        return tf.numpy_function(hold, [], tf.int64)

    busy.get_concrete_function()
    number = os.cpu_count() + 4
    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        held = [pool.submit(busy) for _ in range(number)]
        time.sleep(1)
        watchdog = threading.Timer(30, lambda: (watchdog_rang.append(1), free.set()))
        watchdog.start()
        made = list(cohort)
        assert not any(future.done() for future in held)
        watchdog.cancel()
        free.set()
    assert len(made) == CLIENTS and not watchdog_rang


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([0, 9], 0), {}, ValueError, "client_id 9 is unknown"),
        (([0, "0"], 0), {}, ValueError, "client_id '0' is unknown"),
        (([0, 0.0], 0), {}, WrongTypeError, "client_id must be"),
        (([0], -1), {}, ValueError, "round_num must be"),
        (([0], 0), {"batch_size": 0}, ValueError, "batch_size must be"),
        (([0], 0), {"batchsize": 4}, TypeError, "batchsize"),
    ],
)
def test_cohort_refuses_at_once(arguments, options, error, message):
    with pytest.raises(error, match=message):
        _data().cohort(*arguments, **{**OPTIONS, **options})
    with pytest.raises(TypeError, match="batch_size"):
        _data().cohort([0], 0, labeled_steps=1, unlabeled_steps=1)


def test_cohort_wants_hidden_labels_at_once():
    x, y, client_ids, labeled = _arrays()
    data = federated.from_arrays(x, y, client_ids, labeled)
    with pytest.raises(ValueError, match="not known"):
        data.cohort([0], 0, with_hidden_labels=True, **OPTIONS)
    shown = _data().cohort([0], 0, with_hidden_labels=True, **OPTIONS)[0]
    assert list(shown["unlabeled"].element_spec) == ["x", "y"]
