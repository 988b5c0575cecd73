"""TFF's two kinds of context, the same for every runtime: they hand over to a `Backend`."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any, Protocol

import tensorflow_federated as tff


class Backend(Protocol):
    """Who computes for the contexts."""

    def check(self) -> None:
        """Raises an error in one line where the runtime has ended or cannot compute any more."""

    def submit(self, comp: tff.framework.ConcreteComputation, argument: Any) -> Any:
        """Starts a computation; returns a `concurrent.futures.Future` of its value."""

    def cancel(self, future: concurrent.futures.Future) -> None:
        """Asks what `submit` started to end; does not wait, and may come when it is done."""


class SyncContext(tff.framework.SyncContext):
    """A call returns its value. A call that is interrupted is cancelled."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def invoke(self, comp, arg):
        self._backend.check()
        future = self._backend.submit(comp, arg)
        try:
            return future.result()
        except BaseException as error:
            self._backend.cancel(future)
            if not future.cancelled():
                concurrent.futures.wait([future])
            if isinstance(error, concurrent.futures.CancelledError):
                self._backend.check()  # says so where the runtime was ended meanwhile
            raise


class AsyncContext(tff.framework.AsyncContext):
    """A call returns a coroutine, in whose event loop nothing blocks. It can be cancelled."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def check(self) -> None:
        """Raises an error where the runtime has ended or cannot compute any more."""
        self._backend.check()

    async def invoke(self, comp, arg):
        if asyncio.iscoroutine(arg):
            arg = await arg
        self._backend.check()
        future = self._backend.submit(comp, arg)
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if waiting.cancelled():
                self._backend.check()
            self._backend.cancel(future)
            await asyncio.wait([waiting])
            if not waiting.cancelled():
                waiting.exception()  # seen
            raise
