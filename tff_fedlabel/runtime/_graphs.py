"""TFF's serialized TensorFlow graphs as functions of this process's TensorFlow.

A graph is imported once and then called like any other function, on whichever device the caller's
`tf.device` names. Graphs without state are shared by all threads. A graph that owns variables,
tables or seeded random operations would carry their state from one call to the next, although TFF
promises a fresh start: so each call creates its variables and destroys them again, concurrent calls
never share a copy, and seeded random operations are imported anew.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel.runtime import _kept_tensors
from tff_fedlabel.runtime._private_tensorflow import Call
from tff_fedlabel.runtime._tff_types import map_leaves

# Operations that keep a resource in TensorFlow's resource manager, where it is found by name.
_RESOURCES = frozenset(
    {"VarHandleOp", "HashTableV2", "MutableHashTableV2"}
    | {"MutableDenseHashTableV2", "MutableHashTableOfTensorsV2"}
)
_SEEDS = ("seed", "seed2")
_copies = itertools.count()


class Graph:
    """One TensorFlow computation of TFF, called on flat lists of tensors.

    A dataset is a variant tensor in these lists, as `tf.data.experimental.to_variant` makes it.

    Args:
      proto: The `Computation` proto of a `tff.tensorflow.computation`.

    Attributes:
      graph_def: The graph; it may be changed until the first call imports it.
      sets_dataset_options: Whether the graph itself sets how a dataset is read.
    """

    def __init__(self, proto):
        tensorflow = proto.tensorflow
        self.graph_def = tf.compat.v1.GraphDef()
        tensorflow.graph_def.Unpack(self.graph_def)
        self._initialize_op = tensorflow.initialize_op
        self._token = tensorflow.session_token_tensor_name
        self._feeds = _tensor_names(tensorflow.parameter)
        self._fetches = _tensor_names(tensorflow.result)
        nodes = list(all_nodes(self.graph_def))
        self._has_resources = any(node.op in _RESOURCES for node in nodes)
        self._is_seeded = any(_is_seeded(node) for node in nodes)
        self.sets_dataset_options = any(node.op == "OptionsDataset" for node in nodes)
        self._lock = threading.Lock()
        self._free: list[_Imported] = []

    def __call__(self, arguments: Sequence[tf.Tensor], call: Call) -> list[tf.Tensor]:
        if self._is_seeded:
            return self._import()(arguments, call)
        if self._has_resources:
            with self._copy() as imported:
                return imported(arguments, call)
        with self._lock:
            if not self._free:
                self._free.append(self._import())
        return self._free[0](arguments, call)

    @contextlib.contextmanager
    def _copy(self) -> Iterator[_Imported]:
        """A copy of the graph that no other call uses meanwhile."""
        with self._lock:
            imported = self._free.pop() if self._free else self._import()
        try:
            yield imported
        finally:
            with self._lock:
                self._free.append(imported)

    def _import(self) -> _Imported:
        graph_def = self.graph_def
        if self._has_resources:
            graph_def = _with_own_resources(graph_def, f"tff_{next(_copies)}_")
        return _Imported(graph_def, self._initialize_op, self._feeds, self._fetches, self._token)


class _Imported:
    """A graph in this process, pruned to what its results need."""

    def __init__(self, graph_def, initialize_op, feeds, fetches, token):
        wrapped = tf.compat.v1.wrap_function(lambda: _import(graph_def), [])
        graph = wrapped.graph
        tensors = [graph.get_tensor_by_name(name) for name in feeds]
        if token:  # TFF's name for a session, which some of its own graphs take
            tensors.append(graph.get_tensor_by_name(token))
        # Only graphs that share state between calls use its value.
        self._token = [tf.constant("tff_fedlabel")] if token else []
        # `prune` takes each tensor only once.
        unique = list(dict.fromkeys(fetches))
        self._positions = [unique.index(name) for name in fetches]
        self._run = wrapped.prune(tensors, [graph.get_tensor_by_name(name) for name in unique])
        self._initialize = self._destroy = None
        if initialize_op:
            self._initialize = wrapped.prune([], [graph.get_operation_by_name(initialize_op)])
        destroy = [op for op in graph.get_operations() if op.type == "DestroyResourceOp"]
        if destroy:
            self._destroy = wrapped.prune([], destroy)

    def __call__(self, arguments, call):
        try:
            if self._initialize is not None:
                call.run(self._initialize, [])
            results = call.run(self._run, [*arguments, *self._token])
        finally:
            if self._destroy is not None:
                Call().run(self._destroy, [])  # even if the call was cancelled
        return [results[position] for position in self._positions]


def _import(graph_def) -> None:
    """Imports a graph and adds operations that destroy its resources."""
    tf.import_graph_def(graph_def, name="")
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation.type in _RESOURCES:
            tf.raw_ops.DestroyResourceOp(resource=operation.outputs[0], ignore_lookup_error=True)


def _tensor_names(binding) -> list[str]:
    """The names of the tensors of a TFF binding, in the order of the type's leaves."""
    kind = binding.WhichOneof("binding")
    if kind == "tensor":
        return [binding.tensor.tensor_name]
    if kind == "sequence":
        return [binding.sequence.variant_tensor_name]
    if kind == "struct":
        return [name for element in binding.struct.element for name in _tensor_names(element)]
    return []


def all_nodes(graph_def):
    """The nodes of a graph and of its functions."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _is_seeded(node) -> bool:
    """Whether a node draws from a seeded generator that it keeps between calls."""
    if node.op.startswith("Stateless") or "seed" not in node.attr or "Dataset" in node.op:
        return False
    return any(name in node.attr and node.attr[name].i for name in _SEEDS)


def _with_own_resources(graph_def, prefix):
    """A copy of the graph with its own names for resources in TensorFlow's resource manager."""
    own = tf.compat.v1.GraphDef()
    own.CopyFrom(graph_def)
    for node in all_nodes(own):
        if node.op in _RESOURCES:
            name = node.attr["shared_name"].s or node.name.encode()
            node.attr["shared_name"].s = prefix.encode() + name
    return own


def flatten(value, type_spec: tff.Type, to_dataset) -> list[tf.Tensor]:
    """The tensors of an argument, in the order of the type's leaves.

    Args:
      value: A structure that fits `type_spec`: numbers, arrays, tensors, datasets, lists of the
        elements of a dataset.
      type_spec: Its TFF type; each federated type in it has a single value.
      to_dataset: `(value, tff.SequenceType) -> variant tensor`.

    Raises:
      TypeError: The value does not fit.
    """
    tensors = []

    def visit(leaf, part):
        if isinstance(leaf, tff.FederatedType):
            map_leaves(visit, leaf.member, part)
        elif isinstance(leaf, tff.TensorType):
            tensors.append(_to_tensor(part, leaf))
        elif isinstance(leaf, tff.SequenceType):
            tensors.append(to_dataset(part, leaf))
        else:
            raise TypeError(f"an argument of type {leaf} cannot be used in this runtime")

    map_leaves(visit, type_spec, value)
    return tensors


def _to_tensor(value, type_spec: tff.TensorType) -> tf.Tensor:
    dtype = tf.as_dtype(type_spec.dtype.type)
    kept = _kept_tensors.tensor_of(value)
    if kept is not None and kept.dtype == dtype:
        return _of_shape(kept, type_spec)
    try:
        if not isinstance(value, tf.Tensor):
            value = _converted(value, np.dtype(type_spec.dtype))
        tensor = tf.convert_to_tensor(value, dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"a value of {type(value).__name__} does not match type {type_spec}: {error}"
        ) from None
    return _of_shape(tensor, type_spec)


def _of_shape(tensor: tf.Tensor, type_spec: tff.TensorType) -> tf.Tensor:
    if not tf.TensorShape(type_spec.shape).is_compatible_with(tensor.shape):
        raise TypeError(f"a value of shape {tensor.shape} does not match type {type_spec}")
    return tensor


def _converted(value, dtype: np.dtype):
    """Numbers as an array of a dtype, equal up to rounding; TensorFlow would truncate and wrap."""
    array = np.asarray(value)
    kinds = {array.dtype.kind, dtype.kind}
    if array.dtype == dtype or not array.size or not kinds <= set("biufc"):
        return value
    if not kinds <= set("iu") and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(f"{array.dtype} cannot be converted to {dtype}")
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
    if dtype.kind in "iu":
        fits = converted == array
    else:
        fits = np.isfinite(converted) == np.isfinite(array)
    if not np.all(fits):
        raise ValueError(f"{array[~fits].flat[0]} does not fit in {dtype}")
    return converted


def unflatten(tensors: Sequence[tf.Tensor], type_spec: tff.Type, leaf=None):
    """Builds the value of a type from its tensors.

    Args:
      tensors: As `flatten` gives them.
      type_spec: The type; each federated type in it has a single value.
      leaf: Converts a tensor; by default to a NumPy value, see `_kept_tensors`.
    """
    remaining = iter(tensors)
    to_value = leaf or _kept_tensors.to_numpy

    def visit(part):
        if isinstance(part, tff.FederatedType):
            return map_leaves(visit, part.member)
        if isinstance(part, tff.SequenceType):
            spec = tff.types.type_to_tf_tensor_specs(part.element)
            return tf.data.experimental.from_variant(next(remaining), spec)
        return to_value(next(remaining))

    return tff.types.type_to_py_container(map_leaves(visit, type_spec), type_spec)
