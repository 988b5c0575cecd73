"""TFF's C++ workers on several machines, which were started there beforehand.

On each machine:

    python -m tff_fedlabel.runtime.workers serve --port 8000 --host ADDRESS

and where the learning process runs:

>>> with runtime.use("workers", addresses=["10.0.0.2:8000", "10.0.0.3:8000"]):
...     output = process.next(state, client_data)

A round's clients are divided over the workers and their partial aggregates merged; the result is
that of the local runtime. A worker that dies, hangs or loses its network is left out and the others
compute its part of the round; each later call tries it again, so that a restarted worker comes
back.

There is no password and no encryption: anyone who reaches a worker's port can run computations on
it. Connect the machines by a private network or a tunnel.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import ipaddress
import re
import sys
import threading
from collections.abc import Iterator, Sequence

import tensorflow_federated as tff

from tff_fedlabel.runtime import _mergeable, _newer_tensorflow, _option_checks, _pool, _remote
from tff_fedlabel.runtime._contexts import AsyncContext, SyncContext
from tff_fedlabel.runtime._mergeable import NotMergeableError
from tff_fedlabel.runtime._option_checks import option
from tff_fedlabel.runtime._tff_types import with_lists

__all__ = ["NotMergeableError", "Options", "WorkersRuntime", "start"]


def _addresses(name: str, addresses: object) -> tuple[str, ...]:
    if not isinstance(addresses, list | tuple) or not addresses:
        raise ValueError(
            f"{name} is {addresses!r}; it must be a list of 'host:port' with one entry for each "
            "worker"
        )
    for address in addresses:
        _check_address(address)
    for i, address in enumerate(addresses):
        if address.lower() in (earlier.lower() for earlier in addresses[:i]):
            raise ValueError(f"{name} names {address!r} twice")
    return tuple(addresses)


def _check_address(address: object) -> None:
    match = isinstance(address, str) and re.fullmatch(
        r"(?:(?P<name>[A-Za-z0-9._-]+)|\[(?P<ip6>[0-9A-Fa-f:.]+)\]):(?P<port>[0-9]{1,5})", address
    )
    if match and 0 < int(match["port"]) < 2**16:
        if match["name"]:
            return
        with contextlib.suppress(ValueError):
            ipaddress.IPv6Address(match["ip6"])
            return
    raise ValueError(
        f"addresses holds {address!r}; a worker's address is 'host:port', an IPv6 one '[host]:port'"
    )


@dataclasses.dataclass(frozen=True)
class Options(_option_checks.CheckedOptions):
    """The options of the runtime.

    Attributes:
      addresses: "host:port" of each worker; there is no default.
      attempts: The total number of attempts at a computation if workers are lost during it.
      connect_timeout: Seconds the workers have to answer at the start. Those that do not are left
        out for the time being.
      heartbeat_timeout: Seconds without a heartbeat after which a worker counts as lost. How long
        a computation takes does not matter.
      default_num_clients: Number of clients if a computation's arguments do not determine it.
      stream_structs: Send structures part by part, for values above gRPC's 2 GB.

    Raises:
      ValueError: A bad value.
    """

    addresses: Sequence[str] = option(_addresses, ())
    attempts: int = option(_option_checks.integer(1), 3)
    connect_timeout: float = option(_option_checks.seconds, 30.0)
    heartbeat_timeout: float = option(_option_checks.seconds, 20.0)
    default_num_clients: int = option(_option_checks.integer(0), 0)
    stream_structs: bool = option(_option_checks.flag, False)


@contextlib.contextmanager
def start(**options) -> Iterator[WorkersRuntime]:
    """Connects to workers for the duration of a `with` block; they keep running when it exits.

    Several workers share a computation that takes values of clients; any other runs on one of
    them. With a single address every computation runs there as a whole.

    Args:
      **options: See `Options`.

    Yields:
      A `WorkersRuntime`.

    Raises:
      ValueError: See `Options`.
      WorkerError: No worker answered. Inside the block a computation raises it when no worker is
        left or workers were lost in each of `attempts` attempts; `NotMergeableError` when it
        cannot be divided.
    """
    chosen = Options(**options)
    compiler = _COMPILERS[len(chosen.addresses) > 1]

    def make_context(stub):
        return _remote.execution_context(
            stub,
            chosen.default_num_clients,
            chosen.stream_structs,
            compiler,
            keep_executors=False,
        )

    with contextlib.ExitStack() as resources:
        # A block that never exits, as in a notebook, ends before Python shuts down.
        atexit.register(resources.close)
        resources.callback(atexit.unregister, resources.close)
        # Closed in reverse: the connections end first, so that no thread waits for a worker.
        loop = resources.enter_context(_remote.EventLoopThread("tff-workers"))
        remotes = []
        for address in chosen.addresses:
            thread = resources.enter_context(_remote.EventLoopThread(f"tff-worker-{address}"))
            remotes.append(_pool.Remote(address, thread, make_context, chosen.heartbeat_timeout))
        pool = _pool.Pool(remotes, chosen.attempts)
        resources.callback(_close, pool, loop)
        loop.result(pool.connect(chosen.connect_timeout))
        yield WorkersRuntime(pool, loop, compiler)


def _close(pool, loop):
    if loop.is_alive():  # it is not in a forked child
        loop.result(pool.close())


class WorkersRuntime:
    """The contexts of a set of workers: `context` and `async_context`."""

    def __init__(self, pool, loop, compiler):
        self._pool = pool
        self._loop = loop
        backend = _Backend(pool, loop, compiler)
        self.context = SyncContext(backend)
        self.async_context = AsyncContext(backend)

    @property
    def processes(self) -> tuple[int, ...]:
        """Empty: the workers are not ours."""
        return ()

    @property
    def lost(self) -> dict[str, str]:
        """The addresses of the workers that are currently left out, and why."""
        return self._pool.lost

    def check(self) -> None:
        """Raises `WorkerError` if no worker answers."""
        self._pool.check_open()
        self._loop.result(self._pool.check())


class _Backend:
    """See `_contexts.Backend`; `check` contacts no worker, as the computation itself will."""

    def __init__(self, pool, loop, compiler):
        self._pool = pool
        self._loop = loop
        self._compiler = compiler

    def check(self) -> None:
        self._pool.check_open()

    def submit(self, comp, argument):
        plan = self._compiler.plan(comp)
        argument = with_lists(argument, comp.type_signature.parameter)
        return self._loop.submit(self._pool.run(plan, argument))

    def cancel(self, future) -> None:
        future.cancel()


class _Compiler:
    """Compiles a computation once for all workers, in whatever thread it is first needed."""

    def __init__(self, divide: bool):
        # Reentrant: making a plan compiles computations, so the lock is taken again.
        self._lock = threading.RLock()
        self._compile = functools.lru_cache(_newer_tensorflow.compile_computation)
        self._make_plan = functools.lru_cache(lambda comp: _mergeable.Plan(comp, self, divide))

    def __call__(self, comp: tff.Computation) -> tff.Computation:
        with self._lock:
            return self._compile(comp)

    def plan(self, comp: tff.Computation) -> _mergeable.Plan:
        with self._lock:
            return self._make_plan(comp)


# Compiling a round takes seconds, and does not depend on the workers.
_COMPILERS = {divide: _Compiler(divide) for divide in (False, True)}


if __name__ == "__main__":
    from tff_fedlabel.runtime import _serve

    sys.exit(_serve.main(sys.argv))
