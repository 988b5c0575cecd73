"""Where federated computations run.

`use` installs one of the runtimes as TFF's context for the duration of a `with` block:

>>> with runtime.use("local"):
...     state = process.initialize()
...     output = process.next(state, client_data)
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
from collections.abc import Iterator
from typing import Any

import tensorflow_federated as tff

from tff_fedlabel.runtime import _option_checks
from tff_fedlabel.runtime._program import FederatedContext
from tff_fedlabel.runtime._runtime_errors import (
    ComputationError,
    DeviceError,
    UnsupportedComputationError,
    WorkerError,
)

__all__ = [
    "RUNTIMES",
    "ComputationError",
    "DeviceError",
    "Runtime",
    "UnsupportedComputationError",
    "WorkerError",
    "choose",
    "use",
]

# name -> module. A module has `Options`, a dataclass that raises ValueError for a bad value, and
# `start(**options)`, a context manager that yields an object with `context`, `async_context`,
# `processes` and `check()`, as `Runtime` describes them.
RUNTIMES = {
    "local": "tff_fedlabel.runtime.local",
    "workers": "tff_fedlabel.runtime.workers",
    "device": "tff_fedlabel.runtime.device",
}


def __getattr__(name: str):
    # `python -m tff_fedlabel.runtime.workers` needs its module not to be imported by the package.
    if name in RUNTIMES:
        return importlib.import_module(RUNTIMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclasses.dataclass(frozen=True)
class Runtime:
    """A running runtime, as yielded by `use`.

    Attributes:
      name: The name that was passed to `use`.
      context: The `tff.framework.SyncContext`.
      async_context: The `tff.framework.AsyncContext` on the same workers.
      backend: The runtime's own object, for what only that runtime has.
      asynchronous: Whether `use` installed the context for `tff.program` code.
    """

    name: str
    context: tff.framework.SyncContext
    async_context: tff.framework.AsyncContext
    backend: Any
    asynchronous: bool = False

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of the processes that compute; they have ended when the `with` block exits."""
        return self.backend.processes

    @contextlib.contextmanager
    def installed(self) -> Iterator[Runtime]:
        """Makes the runtime TFF's context in the thread that enters this `with` block.

        For threads that are started inside the block of `use`: TFF keeps a context for each thread,
        and a new thread has none. The block of `use` must outlast them.
        """
        context = self.federated_context() if self.asynchronous else self.context
        # `install` can be undone, `set_default_context` cannot.
        with tff.framework.get_context_stack().install(context):
            yield self

    def federated_context(self) -> tff.program.NativeFederatedContext:
        """A new context for `tff.program` code, such as `tff.learning.programs.train_model`."""
        return FederatedContext(self.async_context)

    def check(self) -> None:
        """Raises `WorkerError`, naming the cause, if a worker is gone."""
        self.backend.check()


def choose() -> str:
    """The name of the runtime that `auto` means: always "device".

    It computes on the GPUs if there are any, and was also faster on CPUs
    (experiments/results has the figures).
    """
    return "device"


def use(
    name: str, *, asynchronous: bool = False, **options: Any
) -> contextlib.AbstractContextManager[Runtime]:
    """Makes a runtime TFF's context inside a `with` block; leaves no process behind.

    The context belongs to the thread that enters the block, as every TFF context does. The previous
    context is restored when the block exits, however it exits. Blocks may follow each other, nest,
    and be open in several threads. A thread that is started inside a block has to enter the same
    runtime itself:

    >>> with runtime.use("device") as running:
    ...     def work():
    ...         with running.installed():
    ...             process.next(state, client_data)
    ...     thread = threading.Thread(target=work)
    ...     thread.start()
    ...     thread.join()

    Args:
      name: `"device"`: the TensorFlow of this process, GPUs included, see `runtime.device.start`;
        `"local"`: TFF's C++ worker on this machine, see `runtime.local.start`; `"workers"`: such
        workers on several machines, see `runtime.workers.start`.
      asynchronous: `True` installs a `tff.program.NativeFederatedContext`, which code written for
        `tff.program` needs; calls then return awaitable references and need a running event loop.
        `False` installs a synchronous context: a call returns its value.
      **options: The runtime's own options: see its module's `Options`.

    Returns:
      A context manager that yields a `Runtime`. Nothing is started before it is entered.

    Raises:
      ValueError: An unknown name, an unknown option, or a bad value; raised by the call itself.
      WorkerError: A worker did not start; raised on entering the block. Inside the block a
        computation raises it when its worker dies, `ComputationError` when the computation itself
        fails, and `UnsupportedComputationError` or `ComputationError` when the runtime cannot run
        its kind.
      DeviceError: A GPU was required and there is none.
    """
    if name not in RUNTIMES:
        raise ValueError(
            f"no runtime {name!r}{_nearest(name, RUNTIMES)}; choose from: {', '.join(RUNTIMES)}"
        )
    asynchronous = _option_checks.flag("asynchronous", asynchronous)
    module = importlib.import_module(RUNTIMES[name])
    known = module.Options.names()
    for option in options:
        if option not in known:
            raise ValueError(
                f"runtime {name!r} has no option {option!r}{_nearest(option, known)}; "
                f"choose from: asynchronous, {', '.join(known)}"
            )
    module.Options(**options)
    return _installed(name, module, asynchronous, options)


@contextlib.contextmanager
def _installed(name, module, asynchronous, options) -> Iterator[Runtime]:
    with module.start(**options) as backend:
        runtime = Runtime(name, backend.context, backend.async_context, backend, asynchronous)
        with runtime.installed():
            yield runtime


def _nearest(word: object, known) -> str:
    near = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
