"""What only private modules of TensorFlow 2.14 can do.

* A function that runs can be cancelled from another thread only through the cancellation manager of
  `tensorflow.python.eager`: without it Ctrl-C would wait for every client that is being computed.
* Which device an operation inside a function was placed on is told only by the graphs that the eager
  context collects; `tf.debugging.set_log_device_placement` prints it and returns nothing.
* A function that was cut out of a graph has no Python signature. Called the public way it first
  fails to bind its arguments to one, with a traceback, at every call: that costs as much as all of
  a small client's work.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator

from tensorflow.python.eager import cancellation
from tensorflow.python.eager import context as eager_context


# Part of every partition, on whichever device; they compute nothing.
_BOOKKEEPING = frozenset({"_Arg", "_Retval", "_DeviceRetval", "_DeviceArg", "_Send", "_Recv"}) | {
    "_HostSend",
    "_HostRecv",
    "Const",
    "Identity",
    "NoOp",
}


def call_flat(function, tensors: list) -> list:
    """Calls a concrete function on the tensors of its inputs, in their order."""
    return function._call_flat(tensors, function.captured_inputs)


@contextlib.contextmanager
def cancellable() -> Iterator[Callable[[], None]]:
    """Yields a function that cancels the TensorFlow functions that run inside the block."""
    manager = cancellation.CancellationManager()
    with cancellation.CancellationManagerContext(manager):
        yield manager.start_cancel


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
