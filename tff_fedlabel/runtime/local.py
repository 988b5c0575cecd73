"""TFF's C++ worker on this machine, with its lifetime, output and start-up under control.

TFF's own local context starts the same worker but lets it outlive Python, gives it Python's
standard output, opens it to the network, waits forever for one that died at start-up, and forever
retries a call to one that died later. Here

* it ends with Python, however Python ends, and writes to a file (`_worker`);
* only this machine reaches it (`_exposure`);
* start-up has a time limit, and a lost worker is a `WorkerError`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
from collections.abc import Iterator

import tensorflow_federated as tff

from tff_fedlabel.runtime import _newer_tensorflow, _option_checks, _remote, _worker
from tff_fedlabel.runtime._contexts import AsyncContext, SyncContext
from tff_fedlabel.runtime._option_checks import option, or_none
from tff_fedlabel.runtime._runtime_errors import ComputationError, WorkerError
from tff_fedlabel.runtime._tff_types import with_lists

__all__ = [
    "ComputationError",
    "LocalRuntime",
    "Options",
    "WorkerError",
    "drop_default_context",
    "start",
]


@dataclasses.dataclass(frozen=True)
class Options(_option_checks.CheckedOptions):
    """The options of the runtime.

    Attributes:
      default_num_clients: Number of clients if a computation's arguments do not determine it.
      max_concurrent_computation_calls: How many clients are computed at once; 0 for no limit. A
        lower number takes less memory.
      stream_structs: Send structures part by part, for values above gRPC's 2 GB.
      startup_timeout: Seconds the worker has to become ready.
      log_file: File that the worker's output is appended to; by default a temporary one.
      worker_binary: The program to run; by default the one in TFF's package.

    Raises:
      ValueError: A bad value.
    """

    default_num_clients: int = option(_option_checks.integer(0), 0)
    max_concurrent_computation_calls: int = option(_option_checks.integer(0), 0)
    stream_structs: bool = option(_option_checks.flag, False)
    startup_timeout: float = option(_option_checks.seconds, 30.0)
    log_file: str | os.PathLike | None = option(or_none(_option_checks.writable_file), None)
    worker_binary: str | os.PathLike | None = option(or_none(_option_checks.program), None)


@contextlib.contextmanager
def start(**options) -> Iterator[LocalRuntime]:
    """Runs one worker for the duration of a `with` block.

    The worker gets this process's environment, so `TF_ENABLE_ONEDNN_OPTS` and the like reach it.

    Args:
      **options: See `Options`.

    Yields:
      A `LocalRuntime`.

    Raises:
      ValueError: See `Options`.
      WorkerError: The worker did not start within `startup_timeout`.
    """
    chosen = Options(**options)
    with contextlib.ExitStack() as resources:
        # A block that never exits, as in a notebook, ends before Python shuts down.
        atexit.register(resources.close)
        resources.callback(atexit.unregister, resources.close)
        # Closed in reverse: the thread may be waiting for the worker, so the worker ends first.
        thread = resources.enter_context(_remote.EventLoopThread("tff-local"))
        worker = _worker.Worker(
            chosen.worker_binary, chosen.max_concurrent_computation_calls, chosen.log_file
        )
        resources.callback(worker.close)
        worker.wait_until_ready(chosen.startup_timeout)
        yield LocalRuntime(worker, thread, chosen)


class LocalRuntime:
    """The contexts of a running worker: `context` and `async_context`, each a normal TFF one."""

    def __init__(self, worker, thread, options: Options):
        self._worker = worker
        self._thread = thread
        self._remote_context = _remote.execution_context(
            _remote.Stub(worker),
            options.default_num_clients,
            options.stream_structs,
            _newer_tensorflow.compile_computation,
        )
        self.context = SyncContext(self)
        self.async_context = AsyncContext(self)

    def submit(self, comp, argument):
        """See `_contexts.Backend`."""
        argument = with_lists(argument, comp.type_signature.parameter)
        return self._thread.submit(self._remote_context.invoke(comp, argument))

    def cancel(self, future) -> None:
        """See `_contexts.Backend`."""
        future.cancel()

    @property
    def processes(self) -> tuple[int, ...]:
        """The worker's process id, in a tuple."""
        return (self._worker.pid,)

    @property
    def port(self) -> int:
        """The TCP port the worker listens on."""
        return self._worker.port

    def check(self) -> None:
        """Raises `WorkerError` if the worker is gone."""
        self._worker.check()

    def log(self) -> str:
        """The last lines of the worker's output, joined by " | "; empty if there is none."""
        return self._worker.log_tail()


class _NoContext(tff.framework.SyncContext):
    def invoke(self, comp, arg):
        raise RuntimeError("Python is shutting down: computations can no longer run")


def drop_default_context() -> None:
    """Ends TFF's own local context; the package calls it when Python ends.

    Importing TFF installs that context. Left until Python shuts down, its clean-up fails with a
    traceback and leaves its worker running.
    """
    tff.framework.set_default_context(_NoContext())
