"""What a newer TensorFlow writes, in TFF's worker, which is built with TensorFlow 2.14."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import runtime
from tff_fedlabel.runtime import _newer_tensorflow, _worker

NUMBERS = np.arange(7, dtype=np.float32) * 1.5
SEQUENCE = tff.SequenceType(np.float32)

newer = pytest.mark.skipif(
    not _newer_tensorflow._IS_NEWER, reason="this TensorFlow writes what the worker reads"
)


def total(dataset):
    return dataset.reduce(np.float32(0), lambda a, b: a + b)


client_total = tff.tensorflow.computation(total, SEQUENCE)


@tff.federated_computation(tff.FederatedType(SEQUENCE, tff.CLIENTS))
def sum_of_clients(datasets):
    return tff.federated_sum(tff.federated_map(client_total, datasets))


@pytest.fixture(autouse=True)
def in_the_worker(local_runtime):
    with tff.framework.get_context_stack().install(local_runtime.context):
        yield


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Files of records


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("records") / "numbers.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for number in NUMBERS:
            writer.write(number.tobytes())
    return path


def decoded(records):
    return records.map(lambda record: tf.io.decode_raw(record, tf.float32)[0])


def of_a_stage(path):
    paths = tf.data.Dataset.from_tensors(path)
    return paths.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE)


READERS = {
    "one file": lambda path: tf.data.TFRecordDataset(path),
    "list of files": lambda path: tf.data.TFRecordDataset([path]),
    "in parallel": lambda path: tf.data.TFRecordDataset([path], num_parallel_reads=2),
    "in a function": of_a_stage,
    "own buffer": lambda path: tf.data.TFRecordDataset(path, buffer_size=100),
    # Their -1 and that of the reader may become one constant.
    "repeated": lambda path: tf.data.TFRecordDataset(path).repeat(-1).prefetch(-1).take(14),
}


@pytest.mark.parametrize("kind", READERS)
def test_records_are_read(kind, file):
    expected = NUMBERS.sum() * (2 if kind == "repeated" else 1)

    @tff.tensorflow.computation(np.str_)
    def read_by_the_worker(path):
        return total(decoded(READERS[kind](path)))

    assert read_by_the_worker(file) == pytest.approx(expected)
    datasets = [decoded(READERS[kind](file)), tf.data.Dataset.from_tensors(np.float32(100))]
    assert client_total(datasets[0]) == pytest.approx(expected)
    assert sum_of_clients(datasets) == pytest.approx(expected + 100)
    with runtime.use("device"):
        assert sum_of_clients(datasets) == pytest.approx(expected + 100)


def test_records_are_read_in_a_structure_and_by_several_workers(file):
    pair = tff.to_type([np.float32, SEQUENCE])

    @tff.federated_computation(tff.FederatedType(pair, tff.CLIENTS))
    def weighted(clients):
        product = tff.tensorflow.computation(lambda p: p[0] * total(p[1]), pair)
        return tff.federated_sum(tff.federated_map(product, clients))

    @tff.federated_computation(tff.FederatedType(np.str_, tff.CLIENTS))
    def by_path(paths):
        read = tff.tensorflow.computation(
            lambda path: total(decoded(tf.data.TFRecordDataset(path))), np.str_
        )
        return tff.federated_sum(tff.federated_map(read, paths))

    clients = [(weight, decoded(tf.data.TFRecordDataset(file))) for weight in (1.0, 2.0, 4.0)]
    assert weighted(clients) == pytest.approx(7 * NUMBERS.sum())
    workers = []
    try:
        for _ in range(2):
            workers.append(_worker.Worker())
            workers[-1].wait_until_ready(30)
        addresses = [f"127.0.0.1:{worker.port}" for worker in workers]
        with runtime.use("workers", addresses=addresses):
            assert weighted(clients) == pytest.approx(7 * NUMBERS.sum())
            assert by_path([file] * 3) == pytest.approx(3 * NUMBERS.sum())
    finally:
        for worker in workers:
            worker.close()


def graph_of(dataset):
    variant = tf.data.experimental.to_variant(dataset)
    return tf.raw_ops.DatasetToGraphV2(input_dataset=variant).numpy()


def reading_function(serialized):
    """A graph, and the nodes of its function that reads a file."""
    graph = tf.compat.v1.GraphDef.FromString(serialized)
    (nodes,) = (
        function.node_def
        for function in graph.library.function
        if any(node.op == "TFRecordDataset" for node in function.node_def)
    )
    return graph, {node.name: node for node in nodes}, nodes


@newer
def test_nothing_but_the_buffer_size_is_changed(file):
    serialized = graph_of(tf.data.TFRecordDataset(file).repeat(-1))
    before, old, _ = reading_function(serialized)
    after, new, nodes = reading_function(_newer_tensorflow._adapted(serialized))
    (added,) = (new[name] for name in new.keys() - old.keys())
    assert added.op == "Const"
    assert tf.make_ndarray(added.attr["value"].tensor) == 256 * 1024
    (reader,) = (name for name in old if old[name].op == "TFRecordDataset")
    assert new[reader].input[2] == f"{added.name}:output:0"
    new[reader].input[2] = old[reader].input[2]
    nodes.remove(added)
    assert after == before


@pytest.mark.parametrize(
    "make",
    [
        lambda path: tf.data.Dataset.range(3).repeat(-1),
        lambda path: tf.data.TFRecordDataset(path, buffer_size=0),
        lambda path: tf.data.TextLineDataset(path),
    ],
)
def test_other_datasets_are_left_alone(make, file):
    assert _newer_tensorflow._adapted(graph_of(make(file))) is None


# What the worker does not know


@newer
@pytest.mark.parametrize("as_data", [False, True])
def test_ignored_indices_are_refused(as_data, local_runtime):
    def scattered(index):
        indices = tf.reshape(index, [1, 1])
        return tf.scatter_nd(indices, [1.0], [3], bad_indices_policy="IGNORE")[0]

    dataset = tf.data.Dataset.from_tensors(np.int32(5)).map(scattered)
    assert total(dataset).numpy() == 0
    with pytest.raises(runtime.UnsupportedComputationError) as caught:
        if as_data:
            client_total(dataset)
        else:
            tff.tensorflow.computation(scattered, np.int32)(5)
    assert "TensorFlow 2.14" in one_line(caught)
    assert "bad_indices_policy='IGNORE' (in the operation 'ScatterNd')" in str(caught.value)
    local_runtime.check()
    assert client_total(tf.data.Dataset.from_tensors(np.float32(2))) == 2


@newer
def test_an_unknown_operation_is_named():
    @tff.tensorflow.computation(SEQUENCE)
    def fingerprint(dataset):
        return dataset.fingerprint()

    if not hasattr(tf.data.Dataset, "fingerprint"):
        pytest.skip("this TensorFlow has no Dataset.fingerprint")
    with pytest.raises(runtime.UnsupportedComputationError) as caught:
        fingerprint(tf.data.Dataset.from_tensors(np.float32(2)))
    assert one_line(caught) == (
        "TFF's worker, built with TensorFlow 2.14, does not know the operation "
        "'DatasetFingerprint'; avoid it, or use runtime.use(\"device\")"
    )


@newer
def test_an_unknown_type_of_an_operation_is_named():
    @tff.tensorflow.computation(np.str_)
    def number(text):
        return tf.strings.to_number(text, tf.uint32)

    try:
        tf.strings.to_number("7", tf.uint32)
    except (TypeError, tf.errors.OpError):
        pytest.skip("this TensorFlow does not know it either")
    with pytest.raises(runtime.UnsupportedComputationError) as caught:
        number("7")
    assert "does not know out_type=uint32 of the operation 'StringToNumber';" in one_line(caught)


def test_a_python_function_is_named():
    @tff.tensorflow.computation(np.float32)
    def in_python(x):
        return tf.ensure_shape(tf.numpy_function(lambda x: x, [x], tf.float32), [])

    with pytest.raises(runtime.UnsupportedComputationError) as caught:
        in_python(1.0)
    assert "cannot run the operation 'PyFunc'; avoid it, or" in one_line(caught)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "Failed to run computation: AttrValue has invalid DataType enum: 29 for attr 'DstT'\n"
            "\t; NodeDef: {{node Cast}}; Op<name=Cast; signature=x:SrcT -> y:DstT; attr=SrcT:type>",
            r"does not know DstT=(int4|29) of the operation 'Cast'; avoid it",
        ),
        (
            "Converting GraphDef to Graph has failed with an error: 'Input 2 of node A was passed "
            "int64 from B:0 incompatible with expected int32.' The binary trying to import",
            r"cannot read the computation \(Input 2 of node A was .* expected int32\); use runtime",
        ),
        (
            "`TensorFlowExecutor::CreateValueComputation` can only create values for computations "
            "and intrinsics. Found computation of type 12",
            "does not run JAX; write the computation in TensorFlow$",
        ),
    ],
)
def test_rarer_words_of_the_worker(said, told):
    with pytest.raises(runtime.UnsupportedComputationError, match=told) as caught:
        raise runtime.UnsupportedComputationError(_newer_tensorflow.unknown_to_worker(said))
    one_line(caught)


def test_other_failures_are_not_explained():
    assert _newer_tensorflow.unknown_to_worker("assertion failed: [too large]") is None


# Options of tf.data


def _options(**values):
    options = tf.data.Options()
    for path, value in values.items():
        *parents, name = path.split("__")
        target = options
        for parent in parents:
            target = getattr(target, parent)
        if not hasattr(type(target), name):
            pytest.skip(f"this TensorFlow has no option {name}")
        setattr(target, name, value)
    return options


@pytest.mark.parametrize(
    "values",
    [
        {"deterministic": True},
        {"autotune__enabled": False},
        {"autotune__cpu_budget": 2, "autotune__ram_budget": 10**6},
        {"autotune__autotune_algorithm": tf.data.experimental.AutotuneAlgorithm.STAGE_BASED},
        {"autotune__initial_parallelism": 2},
        {"autotune__min_parallelism": 1},
        {"experimental_optimization__apply_default_optimizations": False},
        {"experimental_optimization__inject_prefetch": True},
        {"experimental_optimization__seq_interleave_prefetch": True},
        {"experimental_optimization__map_fusion": True},
        {"experimental_optimization__map_and_filter_fusion": True},
        {"experimental_slack": True},
        {"experimental_symbolic_checkpoint": True},
        {"experimental_warm_start": True},
        {"threading__private_threadpool_size": 2, "threading__max_intra_op_parallelism": 1},
        {"dataset_name": "numbers"},
        {"framework_type": ["keras"]},
    ],
    ids="+".join,
)
def test_options_of_the_users_datasets(values):
    options = _options(**values)

    def dataset(numbers):
        rows = tf.data.Dataset.from_tensor_slices(numbers).map(lambda x: x + 1)
        return rows.filter(lambda x: x < 8).prefetch(tf.data.AUTOTUNE).with_options(options)

    @tff.tensorflow.computation(tff.TensorType(np.float32, NUMBERS.shape))
    def made_by_the_worker(numbers):
        return total(dataset(numbers))

    expected = NUMBERS[NUMBERS < 7].sum() + np.count_nonzero(NUMBERS < 7)
    assert made_by_the_worker(NUMBERS) == pytest.approx(expected)
    assert client_total(dataset(NUMBERS)) == pytest.approx(expected)
