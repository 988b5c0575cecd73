"""What only private modules of TensorFlow 2.14 can do.

* A function that runs can be cancelled from another thread only through a cancellation manager of
  `tensorflow.python.eager`, and its public-looking context is one global for all threads: `call`
  hands it over directly. Without it Ctrl-C would wait for every client that is being computed.
* Which device an operation inside a function was placed on is told only by the graphs that the
  eager context collects; `tf.debugging.set_log_device_placement` prints it and returns nothing.
* A function that was cut out of a graph has no Python signature. Called the public way it first
  fails to bind its arguments to one, with a traceback, at every call: that costs as much as all of
  a small client's work.
* Which datasets a dataset was made of is known to its private `_inputs()` only; the alternative,
  its serialized graph, holds all the data that is in memory.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.eager import cancellation, execute
from tensorflow.python.eager import context as eager_context

# Part of every partition, on whichever device; they compute nothing.
_BOOKKEEPING = frozenset({"_Arg", "_Retval", "_DeviceRetval", "_DeviceArg", "_Send", "_Recv"}) | {
    "_HostSend",
    "_HostRecv",
    "Const",
    "Identity",
    "NoOp",
}

# The last two do not tell what they were made of.
_MAY_SHUFFLE = frozenset(
    {"_ShuffleDataset", "_ShuffleAndRepeatDataset", "_RandomDataset"}
    | {"_VariantDataset", "DatasetV1Adapter"}
)


class Call:
    """What is computed for one caller, and can be cancelled from any thread.

    Attributes:
      cause: The first error that was not a cancellation, or None. A function that fails cancels
        all others of the call, and one of those may be the first to tell.
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


def operations_by_device(call: Callable[[], object]) -> tuple[object, collections.Counter]:
    """Runs `call` and counts, for each kind of device, the operations placed on it.

    Counted are the functions that are instantiated meanwhile, so those called for the first time.

    Returns:
      What `call` returned, and device type ("CPU", "GPU") -> number of operations.
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
                kind = node.device.rsplit("/device:", 1)[-1].split(":")[0]
                if kind and node.op not in _BOOKKEEPING:
                    counts[kind] += 1
    return result, counts


def may_shuffle(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset may have come out of `Dataset.shuffle`, in any of its stages."""
    stages = [dataset]
    while stages:
        stage = stages.pop()
        if type(stage).__name__ in _MAY_SHUFFLE:
            return True
        for function in stage._functions():
            # A dataset that is used in a function of another.
            if any(tensor.dtype == tf.variant for tensor in function.function.captured_inputs):
                return True
        stages += stage._inputs()
    return False
