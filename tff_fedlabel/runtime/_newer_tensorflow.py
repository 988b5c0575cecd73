"""Adapts graphs of a newer TensorFlow to TFF's worker, which is built with TensorFlow 2.14.

Found by comparing the operations that TensorFlow 2.14.1, 2.19 and 2.21 register, and the results of
600 small computations and datasets in the worker and in TensorFlow 2.21:

* A file of records is read with a buffer of automatic size (-1), which 2.14 refuses. The size does
  not change what is read, so the worker gets 2.14's default instead.
* The worker ignores attributes that it does not know. Of the new ones only `bad_indices_policy`
  changes a result, and only if it is "IGNORE"; that is refused before anything is sent.
* New operations, new types of old ones and operations that TFF left out of its build fail in the
  worker. Its error is then long and does not give the reason: `unknown_to_worker` does.

With TensorFlow 2.14 graphs are not inspected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel.runtime._runtime_errors import UnsupportedComputationError

_WORKER = "TFF's worker, built with TensorFlow 2.14,"
_ADVICE = 'avoid it, or use runtime.use("device")'
_WORKER_GRAPH_VERSION = 1575
_IS_NEWER = tf.version.GRAPH_DEF_VERSION > _WORKER_GRAPH_VERSION

_BUFFER_BYTES = 256 * 1024
_READER = "TFRecordDataset"
_POLICY, _IGNORE = "bad_indices_policy", b"IGNORE"
# Every serialized graph that needs a look contains one of them; searching costs less than parsing.
_MARKS = (_READER.encode(), b"\x12\x06" + _IGNORE)


def compile_computation(comp: tff.Computation) -> tff.Computation:
    """Compiles a computation to what TFF's worker understands.

    Raises:
      UnsupportedComputationError: It uses something that the worker would read differently.
    """
    comp = tff.backends.native.desugar_and_transform_to_native(comp)
    if not _IS_NEWER:
        return comp
    proto = tff.framework.serialize_computation(comp)
    changes = 0
    for graph in _packed_graphs(proto):
        adapted = _adapted(graph.value)
        if adapted is not None:
            graph.value = adapted
            changes += 1
    return tff.framework.deserialize_computation(proto) if changes else comp


def adapt_value(value) -> None:
    """Changes the datasets in a `Value` proto that is about to be sent, where necessary.

    Raises:
      UnsupportedComputationError: One uses something that the worker would read differently.
    """
    if not _IS_NEWER:
        return
    for sequence in _sequences(value):
        adapted = _adapted(sequence.serialized_graph_def)
        if adapted is not None:
            sequence.serialized_graph_def = adapted


def _packed_graphs(message) -> Iterator:
    """The graphs in a `Computation` proto, each a `google.protobuf.Any`."""
    for field, value in message.ListFields():
        if field.name == "graph_def":
            yield value
        elif field.message_type is not None and field.name != "type":
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _packed_graphs(part)


def _sequences(value) -> Iterator:
    kind = value.WhichOneof("value")
    if kind == "sequence":
        yield value.sequence
    elif kind == "struct":
        for element in value.struct.element:
            yield from _sequences(element.value)
    elif kind == "federated":
        for member in value.federated.value:
            yield from _sequences(member)


def _adapted(serialized: bytes) -> bytes | None:
    """A serialized graph changed so that the worker can read it; None if it can already."""
    if not any(mark in serialized for mark in _MARKS):
        return None
    graph = tf.compat.v1.GraphDef.FromString(serialized)
    changes = 0
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        _refuse_ignored_indices(nodes)
        changes += _set_buffer_sizes(nodes)
    return graph.SerializeToString(deterministic=True) if changes else None


def _refuse_ignored_indices(nodes) -> None:
    for node in nodes:
        if _POLICY in node.attr and node.attr[_POLICY].s == _IGNORE:
            raise UnsupportedComputationError(
                f"{_WORKER} does not know {_POLICY}='IGNORE' (in the operation {node.op!r}) and "
                f"fails on indices out of range; {_ADVICE}"
            )


def _set_buffer_sizes(nodes) -> int:
    """Sets the automatic buffer sizes among the nodes of a graph or function; returns how many."""
    # An input is "name", "name:0" or, in a function, "name:output:0".
    constants = {node.name: node for node in nodes if node.op == "Const"}
    readers = []
    for node in nodes:
        if node.op.startswith(_READER):
            size = constants.get(node.input[2].split(":")[0])
            if size is not None and tf.make_ndarray(size.attr["value"].tensor) == -1:
                readers.append((node, size, node.input[2]))
    for node, size, reference in readers:
        # A separate constant: optimizers share one among all that need a -1.
        own = nodes.add()
        own.CopyFrom(size)
        own.name = f"{node.name}/tff_fedlabel_buffer_size"
        own.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(_BUFFER_BYTES, tf.int64))
        node.input[2] = ":".join([own.name, *reference.split(":")[1:]])
    return len(readers)


def unknown_to_worker(details: str) -> str | None:
    """What the worker did not know, in one line, if that is why it failed; else None.

    Args:
      details: The worker's error message.
    """
    for pattern, what, advice in _UNKNOWN:
        match = re.search(pattern, details, re.DOTALL)
        if match:
            return f"{_WORKER} {' '.join(what(*match.groups()).split())}; {advice}"
    return None


def _name_of_type(number: str) -> str:
    try:
        return tf.as_dtype(int(number)).name
    except TypeError:
        return number


# A pattern in the worker's error message -> what it means, what to do.
_UNKNOWN = (
    (
        r"Op type not registered '(\w+)'",
        lambda op: f"does not know the operation {op!r}",
        _ADVICE,
    ),
    (
        r"No OpKernel was registered to support Op '(\w+)'",
        lambda op: f"cannot run the operation {op!r}",
        _ADVICE,
    ),
    (
        r"Value for attr '(\w+)' of (\S+) is not in the list of allowed values.*?Op<name=(\w+)",
        lambda attr, value, op: f"does not know {attr}={value} of the operation {op!r}",
        _ADVICE,
    ),
    (
        r"invalid DataType enum: (\d+) for attr '(\w+)'.*?Op<name=(\w+)",
        lambda number, attr, op: (
            f"does not know {attr}={_name_of_type(number)} of the operation {op!r}"
        ),
        _ADVICE,
    ),
    (
        r"Converting GraphDef to Graph has failed with an error: '(.*?)' The binary",
        lambda reason: f"cannot read the computation ({reason.rstrip('.')})",
        'use runtime.use("device")',
    ),
    (
        r"Found computation of type 12\b",  # the proto's field `xla`
        lambda: "does not run JAX",
        "write the computation in TensorFlow",
    ),
)
