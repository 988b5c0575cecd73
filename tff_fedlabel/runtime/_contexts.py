"""TFF's two kinds of context, the same for every runtime: they delegate to a `Backend`."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any, Protocol

import tensorflow_federated as tff


class Backend(Protocol):
    """What computes for the contexts."""

    def check(self) -> None:
        """Raises a one-line error if the runtime has ended or can no longer compute."""

    def submit(self, comp: tff.framework.ConcreteComputation, argument: Any) -> Any:
        """Starts a computation; returns a `concurrent.futures.Future` of its value."""

    def cancel(self, future: concurrent.futures.Future) -> None:
        """Cancels what `submit` started; does not wait, and may be called when it is done."""


class SyncContext(tff.framework.SyncContext):
    """A call returns its value. An interrupted call is cancelled."""

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
                self._backend.check()  # raises if the runtime has ended meanwhile
            raise


class AsyncContext(tff.framework.AsyncContext):
    """A call returns a coroutine that does not block its event loop and can be cancelled."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def check(self) -> None:
        """Raises an error if the runtime has ended or can no longer compute."""
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
                waiting.exception()  # marks it as retrieved
            raise
