"""What only private modules of TensorFlow 2.14 can do.

* A function that runs can be cancelled from another thread only through the cancellation manager of
  `tensorflow.python.eager`: without it Ctrl-C would wait for every client that is being computed.
* Which device an operation inside a function ran on is told only by the run metadata that the eager
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
    """Runs `call` and counts, for each device, the operations that ran on it.

    Other threads' operations are counted as well.

    Returns:
      What `call` returned, and device type ("CPU", "GPU") -> operations run.
    """
    context = eager_context.context()
    context.enable_run_metadata()
    try:
        result = call()
        metadata = context.export_run_metadata()
    finally:
        context.disable_run_metadata()
    counts = collections.Counter()
    for device in metadata.step_stats.dev_stats:
        # "/job:localhost/replica:0/task:0/device:GPU:0"; streams and copies have names of their
        # own behind it and list the same operations again.
        parts = device.device.rsplit("/device:", 1)[-1].split(":")
        if len(parts) == 2 and parts[1].isdigit():
            counts[parts[0]] += len(device.node_stats)
    return result, counts
