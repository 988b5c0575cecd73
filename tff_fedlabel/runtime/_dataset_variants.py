"""Converts clients' datasets to the tensors that graphs take."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Mapping

import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel.runtime._graphs import flatten, unflatten
from tff_fedlabel.runtime._private_tensorflow import may_shuffle

_SHUFFLES = ("ShuffleDatasetV3", "ShuffleAndRepeatDatasetV2", "RandomDatasetV2")
_copies = itertools.count()


class DatasetReader:
    """Converts datasets to variant tensors, checked against the type that the computation expects.

    Each is read from its start: one with `Dataset.shuffle` starts from its seed again, like the
    copy of it that TFF's worker gets in every round.
    """

    def __init__(self):
        self._options = _serialized(_reading_options())
        self._known: list[tuple[tff.SequenceType, list[tuple], object]] = []

    def for_clients(self, value, type_spec: tff.SequenceType) -> tf.Tensor:
        dataset = self._checked(value, type_spec)
        specs = tf.nest.flatten(dataset.element_spec)
        # `Dataset.with_options` does the same but takes ten times as long.
        return tf.raw_ops.OptionsDataset(
            input_dataset=_from_its_start(dataset),
            serialized_options=self._options,
            output_types=[spec.dtype for spec in specs],
            output_shapes=[spec.shape for spec in specs],
        )

    def as_given(self, value, type_spec: tff.SequenceType) -> tf.Tensor:
        return _from_its_start(self._checked(value, type_spec))

    def _checked(self, value, type_spec) -> tf.data.Dataset:
        if isinstance(value, list):
            return self._from_list(value, _with_containers(type_spec.element))
        if not isinstance(value, tf.data.Dataset):
            raise TypeError(f"{type(value).__name__} is not a dataset of type {type_spec}")
        # To Python, specs that differ only in their order are equal.
        spec = value.element_spec
        names = _names(spec)
        known = (type_spec is t and names == n and spec == s for t, n, s in self._known)
        if not any(known):
            found = tff.SequenceType(tff.types.tensorflow_to_type(spec))
            if not type_spec.is_assignable_from(found):
                raise TypeError(f"a dataset of type {found} does not match type {type_spec}")
            expected = tff.types.type_to_tf_tensor_specs(_with_containers(type_spec.element))
            if not _same_order(names, _names(expected)):
                # TFF has matched the names; TensorFlow matches by position, in its own order.
                raise TypeError(
                    f"a dataset of elements {spec} does not match type {type_spec}: TensorFlow "
                    "orders them differently; make it yield dictionaries with those names"
                )
            self._known = [*self._known[-15:], (type_spec, names, spec)]
        return value

    def _from_list(self, elements, element_type) -> tf.data.Dataset:
        """A dataset of a list of elements; consecutive ones of equal shape share one array."""
        rows = [flatten(element, element_type, self.as_given) for element in elements]

        def dataset(columns):
            structure = unflatten(columns, element_type, leaf=lambda tensor: tensor)
            return tf.data.Dataset.from_tensor_slices(structure)

        if not rows:
            specs = tf.nest.flatten(tff.types.type_to_tf_tensor_specs(element_type))
            shapes = [[0, *(size or 0 for size in spec.shape)] for spec in specs]
            return dataset([tf.zeros(n, s.dtype) for n, s in zip(shapes, specs, strict=True)])
        runs = itertools.groupby(rows, key=lambda row: [tuple(tensor.shape) for tensor in row])
        parts = [
            dataset([tf.stack(column) for column in zip(*run, strict=False)]) for _, run in runs
        ]
        return functools.reduce(lambda a, b: a.concatenate(b), parts)


def _with_containers(element_type: tff.Type) -> tff.Type:
    """The type with an `OrderedDict` or a tuple where a struct names no container of Python.

    TFF's evaluation of personalization makes such structs, and TFF cannot turn them into specs.
    """
    if not isinstance(element_type, tff.StructType):
        return element_type
    members = [
        (name, _with_containers(member))
        for name, member in tff.structure.iter_elements(element_type)
    ]
    container = getattr(element_type, "python_container", None)
    if container is None:
        named = all(name is not None for name, _ in members)
        container = collections.OrderedDict if named else tuple
    return tff.StructWithPythonType(members, container)


def _reading_options() -> tf.data.Options:
    """Options with which a client's few batches are read in the thread that works on them.

    By default TensorFlow rewrites a pipeline and autotunes it while it runs. TFF's own FedAvg on a
    linear model, 100 clients of two batches, took 31 ms per client with these options and 43 ms
    without (medians of 20 alternating rounds), and rounds can stall without them: destroying an
    iterator waits for the autotuning thread, which sleeps for many seconds at a time.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.threading.private_threadpool_size = 1
    return options


def _names(spec) -> list[tuple]:
    """The path to each tensor of an element, in the order of the dataset's components."""
    if isinstance(spec, Mapping):
        members = [(name, spec[name]) for name in sorted(spec)]
    elif isinstance(spec, tuple) and hasattr(spec, "_fields"):
        members = list(zip(spec._fields, spec, strict=True))
    elif isinstance(spec, tuple | list):
        members = list(enumerate(spec))
    else:
        return [()]
    return [(name, *path) for name, member in members for path in _names(member)]


def _same_order(names: list[tuple], others: list[tuple]) -> bool:
    """Whether the names at each position are the same; elements of a tuple have no name."""
    if len(names) != len(others):
        return True  # not a difference in order; the types differ
    pairs = (pair for a, b in zip(names, others, strict=True) for pair in zip(a, b, strict=False))
    return all(a == b for a, b in pairs if isinstance(a, str) and isinstance(b, str))


def _from_its_start(dataset: tf.data.Dataset) -> tf.Tensor:
    """The dataset's variant; one that shuffles starts from its seed whenever it is read."""
    variant = tf.data.experimental.to_variant(dataset)
    if not may_shuffle(dataset):
        return variant
    graph = _graph_of(variant)
    nodes = {node.name: node for node in graph.node}
    shuffles = [node for node in graph.node if node.op in _SHUFFLES]
    if not shuffles:
        return variant
    for node in shuffles:
        # The last input is the handle of the generator, and a generator of that name is shared.
        # A new name makes a new generator, which ends with the dataset.
        source = nodes[node.input[-1].split(":")[0]]
        for handle in source.attr["value"].tensor.resource_handle_val:
            handle.name = f"tff_seed_generator_{next(_copies)}"
    return _rebuilt_when_read(graph.SerializeToString(), dataset)


def _rebuilt_when_read(graph: bytes, dataset: tf.data.Dataset) -> tf.Tensor:
    """A dataset that each iterator rebuilds from a graph.

    Iterators of one dataset share its seed generators: if a client's work loops over it twice,
    which loop comes first, and so gets the first order, would be left to chance.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    kind = {
        "output_types": [spec.dtype for spec in specs],
        "output_shapes": [spec.shape for spec in specs],
    }
    read = tf.raw_ops.FlatMapDataset(
        input_dataset=tf.raw_ops.TensorDataset(components=[graph], output_shapes=[[]]),
        other_arguments=[],
        f=_dataset_from_graph(),
        **kind,
    )
    if dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY:
        return read
    return tf.raw_ops.AssertCardinalityDataset(
        input_dataset=read, cardinality=dataset.cardinality(), **kind
    )


@functools.cache
def _dataset_from_graph():
    """serialized graph -> the dataset that it makes."""
    make = tf.function(lambda graph: tf.raw_ops.DatasetFromGraph(graph_def=graph))
    with tf.device(None):  # the first caller may be a client on a GPU
        return make.get_concrete_function(tf.TensorSpec([], tf.string))


def _graph_of(variant: tf.Tensor) -> tf.compat.v1.GraphDef:
    # Any state stays in this process.
    ignore = tf.data.experimental.ExternalStatePolicy.IGNORE.value
    graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=ignore)
    return tf.compat.v1.GraphDef.FromString(graph.numpy())


def _serialized(options: tf.data.Options) -> bytes:
    """Options as the operation takes them, read from a dataset that has them."""
    dataset = tf.data.Dataset.range(1).with_options(options)
    nodes = _graph_of(tf.data.experimental.to_variant(dataset)).node
    (node,) = (node for node in nodes if node.op == "OptionsDataset")
    return node.attr["serialized_options"].s
