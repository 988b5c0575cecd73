"""TFF's C++ worker on this machine, with its life, output and start-up in our hands.

TFF's own local context starts the same worker but lets it outlive Python, hands it Python's
standard output, opens it to the network, waits for ever for one that died at start, and repeats for
ever a call to one that died later. Here

* it ends with Python, however Python ends, and writes to a file (`_worker`);
* nothing but this machine reaches it (`_exposure`);
* start-up has a time limit, and a lost worker is a `WorkerError`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator

import tensorflow_federated as tff

from tff_fedlabel.runtime import _newer_tensorflow, _remote, _worker
from tff_fedlabel.runtime._checks import check_flag, check_integer, check_seconds
from tff_fedlabel.runtime._errors import ComputationError, WorkerError

__all__ = [
    "ComputationError",
    "LocalRuntime",
    "WorkerError",
    "drop_default_context",
    "start",
    "validate",
]


def validate(
    *,
    default_num_clients: int = 0,
    max_concurrent_computation_calls: int = 0,
    stream_structs: bool = False,
    startup_timeout: float = 30.0,
    log_file: str | os.PathLike | None = None,
    worker_binary: str | os.PathLike | None = None,
) -> None:
    """Raises `ValueError`, in one line, where an option of `start` has a bad value."""
    check_integer("default_num_clients", default_num_clients, 0)
    check_integer("max_concurrent_computation_calls", max_concurrent_computation_calls, 0)
    check_flag("stream_structs", stream_structs)
    check_seconds("startup_timeout", startup_timeout)
    if log_file is not None:
        folder = os.path.dirname(os.path.abspath(log_file))
        target = log_file if os.path.exists(log_file) else folder
        if os.path.isdir(log_file) or not os.access(target, os.W_OK):
            raise ValueError(f"log_file {str(log_file)!r} is not a file that can be written")
    if worker_binary is not None and not (
        os.path.isfile(worker_binary) and os.access(worker_binary, os.X_OK)
    ):
        raise ValueError(f"worker_binary {str(worker_binary)!r} is not a file that can be run")


@contextlib.contextmanager
def start(
    *,
    default_num_clients: int = 0,
    max_concurrent_computation_calls: int = 0,
    stream_structs: bool = False,
    startup_timeout: float = 30.0,
    log_file: str | os.PathLike | None = None,
    worker_binary: str | os.PathLike | None = None,
) -> Iterator[LocalRuntime]:
    """Runs one worker for the length of a `with` block.

    The worker gets this process's environment, so `TF_ENABLE_ONEDNN_OPTS` and the like reach it.

    Args:
      default_num_clients: Number of clients of a computation whose arguments do not tell.
      max_concurrent_computation_calls: How many clients are computed at once; 0 for no limit. A
        lower number takes less memory.
      stream_structs: Send structures part by part, for values above gRPC's 2 GB.
      startup_timeout: Seconds the worker has to become ready.
      log_file: File that the worker's output is appended to; by default a temporary one.
      worker_binary: The program to run; by default the one in TFF's package.

    Yields:
      A `LocalRuntime`.

    Raises:
      ValueError: See `validate`.
      WorkerError: The worker did not start within `startup_timeout`.
    """
    validate(
        default_num_clients=default_num_clients,
        max_concurrent_computation_calls=max_concurrent_computation_calls,
        stream_structs=stream_structs,
        startup_timeout=startup_timeout,
        log_file=log_file,
        worker_binary=worker_binary,
    )
    with contextlib.ExitStack() as resources:
        # A block that is never left, as in a notebook, ends while Python is still whole.
        atexit.register(resources.close)
        resources.callback(atexit.unregister, resources.close)
        # Left in reverse: the thread may be waiting for the worker, so the worker goes first.
        thread = resources.enter_context(_remote.EventLoopThread("tff-local"))
        worker = _worker.Worker(worker_binary, max_concurrent_computation_calls, log_file)
        resources.callback(worker.close)
        worker.wait_until_ready(startup_timeout)
        yield LocalRuntime(worker, thread, default_num_clients, stream_structs)


class LocalRuntime:
    """The contexts of a running worker: `context` and `async_context`, each a normal TFF one."""

    def __init__(self, worker, thread, default_num_clients, stream_structs):
        self._worker = worker
        self.async_context = _remote.async_context(
            _remote.Stub(worker),
            default_num_clients,
            stream_structs,
            _newer_tensorflow.compile_computation,
        )
        self.context = _remote.SyncContext(self.async_context, worker.check, thread)

    @property
    def processes(self) -> tuple[int, ...]:
        """The worker's process id, in a tuple."""
        return (self._worker.pid,)

    @property
    def port(self) -> int:
        """The TCP port the worker listens on."""
        return self._worker.port

    def check(self) -> None:
        """Raises `WorkerError` where the worker is gone."""
        self._worker.check()

    def log(self) -> str:
        """The last lines of the worker's output, joined by " | "; empty where there is none."""
        return self._worker.log_tail()


class _NoContext(tff.framework.SyncContext):
    def invoke(self, comp, arg):
        raise RuntimeError("Python is ending: no computation can be run any more")


def drop_default_context() -> None:
    """Ends TFF's own local context; the package calls it when Python ends.

    Importing TFF installs that context. Left to the very end of Python its clean-up fails with a
    traceback and leaves its worker running.
    """
    tff.framework.set_default_context(_NoContext())
