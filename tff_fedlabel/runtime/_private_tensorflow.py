"""What only private modules of TensorFlow can do.

* A running function can be cancelled from another thread only through a cancellation manager of
  `tensorflow.python.eager`, and its public-looking context is one global for all threads: `Call`
  passes the manager directly. Without it Ctrl-C would wait for every client in progress.
* Only the graphs that the eager context collects show which device an operation inside a function
  was placed on; `tf.debugging.set_log_device_placement` prints it and returns nothing.
* A function that was pruned from a graph has no Python signature. Called the public way it first
  fails to bind its arguments to one, with a traceback, at every call: that costs as much as all of
  a small client's work.
* Only the kernel registry shows which kernels an operation has; together with the op registry it
  shows which of an operation's results are in host memory. A TensorFlow built for CUDA registers
  its GPU kernels on machines without a GPU, too.
* Whether op determinism is on: the public API can turn it on but not query it.
* Only a dataset's private `_inputs()` shows which datasets it was made from; the alternative, its
  serialized graph, holds all the data that is in memory.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.eager import cancellation, execute
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import config, kernels, op_def_registry

# Part of every partition on any device; they compute nothing.
_BOOKKEEPING = frozenset({"_Arg", "_Retval", "_DeviceRetval", "_DeviceArg", "_Send", "_Recv"}) | {
    "_HostSend",
    "_HostRecv",
    "Const",
    "Identity",
    "NoOp",
}

# The last two do not show what they were made from.
_MAY_SHUFFLE = frozenset(
    {"_ShuffleDataset", "_ShuffleAndRepeatDataset", "_RandomDataset"}
    | {"_VariantDataset", "DatasetV1Adapter"}
)


class Call:
    """What is computed for one caller; it can be cancelled from any thread.

    Attributes:
      cause: The first error that was not a cancellation, or None. A function that fails cancels
        all others of the call, and one of those may be the first to report.
    """

    def __init__(self):
        self._manager = cancellation.CancellationManager()
        self.cause: Exception | None = None

    def failed(self, error: Exception) -> None:
        if self.cause is None and not isinstance(error, tf.errors.CancelledError):
            self.cause = error

    def cancel(self) -> None:
        self._manager.start_cancel()

    def run(self, function, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Calls a concrete function on the tensors of its inputs, in their order."""
        context = eager_context.context()
        name = function.name
        options = context.function_call_options.as_attrs()
        return execute.execute_with_cancellation(
            name.decode() if isinstance(name, bytes) else name,
            num_outputs=len(function.outputs),
            inputs=tensors,
            attrs=tuple(itertools.chain(*options.items())),
            ctx=context,
            cancellation_manager=self._manager,
        )


class Operation(NamedTuple):
    """A type of operation on a device.

    Attributes:
      device: "GPU:0": type and number of the device it was placed on.
      op: Its type, "Conv2D".
      on_gpu: TensorFlow's support for it on a GPU: `GPU_KERNEL`, `HOST_MEMORY` or a text that
        starts with `NO_GPU_KERNEL`.
    """

    device: str
    op: str
    on_gpu: str

    @property
    def kind(self) -> str:
        """The type of the device, "GPU"."""
        return self.device.split(":")[0]


GPU_KERNEL = "GPU kernel"
HOST_MEMORY = "host memory"  # placed on a GPU it still computes in the host's memory, by design
NO_GPU_KERNEL = "no GPU kernel"


def operations_by_device(call: Callable[[], object]) -> tuple[object, collections.Counter]:
    """Runs `call` and counts, by device and type, the operations that it runs.

    Only functions instantiated meanwhile are counted, that is, those called for the first time.

    Returns:
      What `call` returned, and `Operation` -> how many of them.
    """
    context = eager_context.context()
    context.enable_graph_collection()
    try:
        result = call()
        metadata = context.export_run_metadata()
    finally:
        context.disable_graph_collection()
    counts = collections.Counter()
    for function in metadata.function_graphs:
        for graph in function.partition_graphs:
            for node in graph.node:
                # "/job:localhost/replica:0/task:0/device:GPU:0"
                device = node.device.rsplit("/device:", 1)[-1]
                if device and node.op not in _BOOKKEEPING:
                    counts[Operation(device, node.op, support_on_gpu(node))] += 1
    return result, counts


def by_kind(operations: collections.Counter) -> collections.Counter:
    """Device type ("CPU", "GPU") -> number of operations."""
    counts = collections.Counter()
    for operation, number in operations.items():
        counts[operation.kind] += number
    return counts


def support_on_gpu(node) -> str:
    """This TensorFlow's support for a node on a GPU, whether there is one or not.

    Args:
      node: A `NodeDef`.

    Returns:
      `GPU_KERNEL`; `HOST_MEMORY` if the GPU's kernel leaves all its results in host memory, as for
      shapes, datasets and most arithmetic of int32; or that there is no kernel, and for which
      dtype if others have one.
    """
    registered = _gpu_kernels(node.op)
    if not registered:
        return NO_GPU_KERNEL
    definition = op_def_registry.get(node.op)
    types = _types(node, definition)
    fitting = [kernel for kernel in registered if _fits(kernel, types)]
    if not fitting:
        return f"{NO_GPU_KERNEL} for {', '.join(_types_without_kernel(registered, types))}"
    in_host_memory = set(fitting[0].host_memory_arg)
    outputs = {output.name for output in definition.output_arg} if definition else set()
    return HOST_MEMORY if outputs and outputs <= in_host_memory else GPU_KERNEL


@functools.cache
def _gpu_kernels(op: str) -> list:
    """The kernels that an operation on a GPU may get, the preferred ones first."""
    found = kernels.get_registered_kernels_for_op(op).kernel
    # A kernel of the device DEFAULT runs anywhere. One with a label is used only on request.
    found = [k for k in found if k.device_type in ("GPU", "DEFAULT") and not k.label]
    return sorted(found, key=lambda k: k.device_type, reverse=True)


def _types(node, definition) -> dict[str, list[int]]:
    """The dtypes of a node, by the names of its attributes."""
    attributes = {a.name: a.default_value for a in definition.attr} if definition else {}
    attributes.update(node.attr)
    return {
        name: [value.type] if value.type else list(value.list.type)
        for name, value in attributes.items()
        if value.WhichOneof("value") in ("type", "list")
    }


def _fits(kernel, types: dict[str, list[int]]) -> bool:
    for constraint in kernel.constraint:
        allowed = constraint.allowed_values.list.type
        if allowed and not set(types.get(constraint.name, ())) <= set(allowed):
            return False
    return True


def _types_without_kernel(registered, types: dict[str, list[int]]) -> list[str]:
    """Names of dtypes that no kernel takes; of all dtypes if only their combination is at fault."""
    allowed = collections.defaultdict(set)
    for kernel in registered:
        for constraint in kernel.constraint:
            allowed[constraint.name].update(constraint.allowed_values.list.type)
    asked = [(name, t) for name in sorted(allowed) for t in types.get(name, ())]
    missing = [(name, t) for name, t in asked if t not in allowed[name]] or asked
    return list(dict.fromkeys(tf.as_dtype(t).name for _, t in missing))


def op_determinism_is_enabled() -> bool:
    return config.is_op_determinism_enabled()


def may_shuffle(dataset: tf.data.Dataset) -> bool:
    """Whether any stage of a dataset may come from `Dataset.shuffle`."""
    stages = [dataset]
    while stages:
        stage = stages.pop()
        if type(stage).__name__ in _MAY_SHUFFLE:
            return True
        for function in stage._functions():
            # A dataset that is captured by a function of another.
            if any(tensor.dtype == tf.variant for tensor in function.function.captured_inputs):
                return True
        stages += stage._inputs()
    return False
