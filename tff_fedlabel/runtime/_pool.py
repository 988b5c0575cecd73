"""Workers that others started: connections that may break, and calls that are retried.

All state changes happen in one event loop, so nothing here is locked. TFF's own calls block while
the worker computes; each worker therefore has its own thread for them, and the loop meanwhile sends
the worker heartbeats. The connection to a worker that stops answering is closed, which ends the
blocked call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import grpc
import tensorflow_federated as tff
from absl import logging

from tff_fedlabel.runtime import _mergeable, _remote
from tff_fedlabel.runtime._runtime_errors import ComputationError, WorkerError

_PROBE_SECONDS = 1.0  # to reconnect to a lost worker at the next call
_ENDED = "this runtime has ended: call computations inside its `with` block"


class _Lost(WorkerError):
    """A worker is gone; the message is the cause."""


class _Link:
    """One connection to a worker: the `_remote.Peer` of its calls. Once closed it stays closed."""

    def __init__(self, address: str):
        self.channel = _remote.open_channel(address)
        self.cause: str | None = None

    @property
    def closed(self) -> bool:
        return self.cause is not None

    def close(self, cause: str) -> None:
        self.cause = self.cause or cause
        self.channel.close()

    def check(self) -> None:
        if self.closed:
            raise _Lost(self.cause)

    def lost(self, error: grpc.RpcError) -> Exception:
        return _Lost(self.cause or _one_line(error))

    async def answers(self, seconds: float, wait: bool = False) -> str | None:
        """Sends a heartbeat; returns None if the worker answers, else why it does not."""
        if self.closed:
            return self.cause
        call = _remote.ask(self.channel, seconds, wait)
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake(_):
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: done.done() or done.set_result(None))

        call.add_done_callback(wake)
        try:
            await done
        finally:
            call.cancel()
        if _remote.answered(call):
            return None
        if self.cause is None and call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no heartbeat for {seconds:g} s"
        return self.cause or _one_line(call)


class Remote:
    """A worker at an address, with or without a connection.

    Attributes:
      address: "host:port".
      link: The connection, or None.
      cause: Why there is none.
    """

    def __init__(self, address, thread, make_context: Callable, heartbeat_timeout: float):
        self.address = address
        self.link: _Link | None = None
        self.cause = "not connected yet"
        self._thread = thread
        self._make_context = make_context
        self._heartbeat_timeout = heartbeat_timeout
        self._connecting = asyncio.Lock()
        self._next_try = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to reconnect. Attempts take at most a tenth of the time."""
        return time.monotonic() >= self._next_try

    async def connect(self, seconds: float, wait: bool = False) -> None:
        """Tries to connect; sets `cause` if that fails.

        Args:
          seconds: Time limit.
          wait: Keep trying until then, even if the other machine refuses at once.
        """
        async with self._connecting:
            if self.link is not None:
                return
            started = time.monotonic()
            link = _Link(self.address)
            try:
                cause = await link.answers(seconds, wait)
                if cause is not None and wait:
                    # Only a call that does not wait learns why there is no connection.
                    cause = await link.answers(_PROBE_SECONDS)
            except BaseException:
                link.close("interrupted")
                raise
            if cause is not None:
                link.close(cause)
                self.cause = cause
                self._next_try = time.monotonic() + 10 * (time.monotonic() - started)
                return
            self._context = self._make_context(_remote.Stub(link))
            self.link = link

    async def call(self, comp: tff.Computation, argument: Any) -> Any:
        """Runs a computation on the worker; raises `_Lost` if the worker is lost meanwhile."""
        link = self.link
        if link is None:
            raise _Lost(self.cause)
        try:
            return await self._watched(link, self._context.invoke(comp, argument))
        except asyncio.CancelledError:
            # Only closing the connection ends the blocked call; the next call makes a new one.
            self.drop(link, "the call was cancelled", quiet=True)
            raise
        except Exception as error:
            cause = link.cause
            if cause is None and isinstance(error, _Lost):
                cause = str(error)
            if cause is None and isinstance(error, ComputationError):
                # Which error a worker's death causes depends on when it died.
                cause = await link.answers(self._heartbeat_timeout)
            if cause is None:
                raise
            self.drop(link, cause)
            raise _Lost(cause) from error

    async def _watched(self, link, coroutine):
        work = asyncio.wrap_future(self._thread.submit(coroutine))
        while True:
            # This pause and the heartbeat's time limit add up to the time-out.
            done, _ = await asyncio.wait({work}, timeout=self._heartbeat_timeout / 4)
            if done:
                return work.result()
            cause = await link.answers(self._heartbeat_timeout * 3 / 4)
            if cause is not None and not work.done():
                link.close(cause)

    async def check(self) -> None:
        """Drops the connection if the worker does not answer."""
        link = self.link
        cause = link and await link.answers(self._heartbeat_timeout)
        if cause:
            self.drop(link, cause)

    def drop(self, link: _Link, cause: str, quiet: bool = False) -> None:
        """Ends a connection."""
        link.close(cause)
        if self.link is link:
            self.link = None
            self.cause = link.cause
            if not quiet:
                logging.warning("worker %s is lost: %s", self.address, self.cause)


class Pool:
    """Several workers; runs computations on those that answer.

    Args:
      remotes: The workers.
      attempts: The total number of attempts at a computation.
    """

    def __init__(self, remotes: list[Remote], attempts: int):
        self._remotes = remotes
        self._attempts = attempts
        self._closed = False

    async def connect(self, seconds: float) -> None:
        """Connects to every worker; `WorkerError` if none answers in time."""
        await asyncio.gather(*(remote.connect(seconds, wait=True) for remote in self._remotes))
        self._alive()
        for remote in self._remotes:
            if remote.link is None:
                logging.warning("worker %s does not answer: %s", remote.address, remote.cause)

    async def check(self) -> None:
        """Raises `WorkerError` if no worker answers."""
        self.check_open()
        await asyncio.gather(*(remote.check() for remote in self._remotes))
        await self._revive()

    async def run(self, plan: _mergeable.Plan, argument: Any) -> Any:
        """Runs a computation.

        A part whose worker is lost is run again on another; the parts are pure functions, so the
        result is the same whichever worker computes them.

        Raises:
          WorkerError: No worker is left, or workers were lost in every attempt.
          ComputationError: The computation itself failed.
        """
        self.check_open()
        await self._revive()
        attempts = _Attempts(self._attempts)
        if plan.whole is not None:
            return (await self._compute(plan.whole, [argument], attempts))[0]
        parts = plan.divide(argument, len(self._remotes))
        merged, *others = await self._compute(plan.up_to_merge, parts, attempts)
        for other in others:
            pair = plan.merge_argument(merged, other)
            merged = (await self._compute(plan.merge, [pair], attempts))[0]
        arguments = plan.after_arguments(parts, merged)
        return plan.join(await self._compute(plan.after_merge, arguments, attempts))

    async def _compute(self, comp, arguments, attempts) -> list[Any]:
        results = {}
        while True:
            missing = [i for i in range(len(arguments)) if i not in results]
            if not missing:
                return [results[i] for i in range(len(arguments))]
            alive = self._alive()
            calls = [alive[n % len(alive)].call(comp, arguments[i]) for n, i in enumerate(missing)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            lost = False
            for i, outcome in zip(missing, outcomes, strict=True):
                if not isinstance(outcome, BaseException):
                    results[i] = outcome
                elif isinstance(outcome, _Lost):
                    lost = True
                else:
                    raise outcome
            if lost:
                self.check_open()
                self._alive()  # raises if none is left, even if attempts are
                attempts.spend(self._causes())

    async def _revive(self) -> None:
        lost = [remote for remote in self._remotes if remote.link is None]
        if len(lost) < len(self._remotes):
            lost = [remote for remote in lost if remote.is_due]
        await asyncio.gather(*(remote.connect(_PROBE_SECONDS) for remote in lost))
        self._alive()

    def _alive(self) -> list[Remote]:
        alive = [remote for remote in self._remotes if remote.link is not None]
        if not alive:
            raise WorkerError(f"no worker answers: {self._causes()}")
        return alive

    def _causes(self) -> str:
        return ", ".join(f"{address} ({cause})" for address, cause in self.lost.items())

    @property
    def lost(self) -> dict[str, str]:
        """Why each worker without a connection has none, by address."""
        return {remote.address: remote.cause for remote in self._remotes if remote.link is None}

    def check_open(self) -> None:
        """Raises `WorkerError` if the runtime has ended."""
        if self._closed:
            raise WorkerError(_ENDED)

    async def close(self) -> None:
        """Ends every connection, and thereby every call."""
        self._closed = True
        for remote in self._remotes:
            if remote.link is not None:
                remote.drop(remote.link, _ENDED, quiet=True)


class _Attempts:
    """Counts the attempts that a computation has left."""

    def __init__(self, number: int):
        self._number = self._left = number

    def spend(self, causes: str) -> None:
        self._left -= 1
        if self._left <= 0:
            times = "1 attempt" if self._number == 1 else f"{self._number} attempts"
            raise WorkerError(f"workers were lost in {times} at the computation: {causes}")


def _text(error) -> str:
    return " ".join((error.details() or "").split())


def _one_line(error) -> str:
    return f"{error.code().name}: {_text(error)[:200]}"
