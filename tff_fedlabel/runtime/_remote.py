"""Calls a running worker over gRPC: the channel, TFF's stub and executor, the contexts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Protocol

import grpc
import tensorflow_federated as tff

from tff_fedlabel.runtime import _newer_tensorflow
from tff_fedlabel.runtime._runtime_errors import (
    ComputationError,
    UnsupportedComputationError,
    WorkerError,
    readable,
)

_MAX_MESSAGE_BYTES = 2 * 1000**3  # TFF's own limit; gRPC's default of 4 MB is less than a model
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A proxy named in the environment must not catch calls to our own machine.
    ("grpc.enable_http_proxy", 0),
    # Otherwise two channels in one process to a port used twice would share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_FORGOTTEN = "No executor found for ID"  # from a worker that was restarted since
_CLEAN_UP = ("Dispose", "DisposeExecutor")
_CLEAN_UP_SECONDS = 5.0
_JOIN_SECONDS = 5.0


class Peer(Protocol):
    """What knows the state of the worker that a `Stub` calls."""

    channel: grpc.Channel

    @property
    def closed(self) -> bool:
        """Whether the worker is no longer used."""

    def check(self) -> None:
        """Raises `WorkerError` if the worker is gone."""

    def lost(self, error: grpc.RpcError) -> WorkerError:
        """The error to raise when a call did not reach a worker."""


def open_channel(address: str) -> grpc.Channel:
    """A channel to a worker at "host:port"; it connects when it is first used."""
    return grpc.insecure_channel(address, _OPTIONS)


def ask(channel: grpc.Channel, timeout: float, wait: bool = False) -> grpc.Future:
    """Checks whether anything answers: see `answered`.

    gRPC's own readiness notifications come from a thread that prints a traceback if the channel is
    closed meanwhile.

    Args:
      channel: The channel to ask through.
      timeout: Seconds until the call fails.
      wait: Try to connect until then, rather than once.
    """
    method = channel.unary_unary("/tff_fedlabel/AreYouThere")
    return method.future(b"", timeout=timeout, wait_for_ready=wait)


def answered(call: grpc.Future) -> bool:
    """Whether anything answered: any gRPC server answers even a method that it does not know."""
    return call.code() in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED)


def execution_context(
    stub: Stub,
    default_num_clients: int,
    stream_structs: bool,
    compiler: Callable,
    *,
    keep_executors: bool = True,
) -> tff.framework.AsyncExecutionContext:
    """A TFF context that computes on one worker.

    Args:
      stub: The worker's.
      default_num_clients: Number of clients if a computation's arguments do not determine it.
      stream_structs: Send structures part by part.
      compiler: Compiles a computation to what the worker understands.
      keep_executors: Keep the worker's executor for a number of clients for the next call. A
        worker that was restarted meanwhile may have given the executor's id to something else.

    Returns:
      A `tff.framework.AsyncExecutionContext`. Its coroutines block while the worker computes.
    """

    def executor(cardinalities):
        cardinalities.setdefault(tff.CLIENTS, default_num_clients)
        executor = Executor(stub, stream_structs)
        executor.set_cardinalities(cardinalities)
        return executor

    keeping = tff.framework.ResourceManagingExecutorFactory
    return tff.framework.AsyncExecutionContext(
        keeping(executor) if keep_executors else _FreshExecutors(executor),
        compiler,
        transform_args=tff.tensorflow.transform_args,
        transform_result=tff.tensorflow.transform_result,
    )


class _FreshExecutors(tff.framework.ExecutorFactory):
    """A new executor for every call; it ends with the call, as `Executor` does."""

    def __init__(self, create: Callable):
        self._create = create

    def create_executor(self, cardinalities):
        return self._create({**cardinalities})

    def clean_up_executor(self, cardinalities):
        pass


class EventLoopThread:
    """A thread that runs coroutines, and ends with its `with` block.

    TFF's own synchronous context never ends its thread; a search over many runs would accumulate
    threads and open files.
    """

    def __init__(self, name: str):
        self._name = name

    def __enter__(self):
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name=self._name, daemon=True
        )
        self._thread.start()
        started.wait()
        return self

    async def _serve(self, started):
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        # Errors reach the caller that waits for the result; the loop need not print them as well.
        self._loop.set_exception_handler(lambda loop, context: None)
        started.set()
        await self._stop.wait()

    def submit(self, coroutine) -> concurrent.futures.Future:
        """Starts a coroutine on the thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def result(self, coroutine):
        """Waits for what a coroutine returns; an interrupted wait cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()  # does nothing if it is done

    def is_alive(self) -> bool:
        """Whether the thread runs; it does not in a forked child."""
        return self._thread.is_alive()

    def __exit__(self, *exception):
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_JOIN_SECONDS)


class Executor(tff.framework.RemoteExecutor):
    """TFF's executor, which also frees its memory in the worker when it is no longer used.

    TFF keeps the executors of the ten numbers of clients used last and drops others without
    closing them: each keeps about 10 MB and a dozen threads in the worker.
    """

    def __init__(self, stub: Stub, stream_structs: bool):
        # Values are freed one by one rather than in batches: one may be a whole model.
        super().__init__(stub, dispose_batch_size=1, stream_structs=stream_structs)
        self._worker_is_closed = stub.is_closed

    def __del__(self):
        if not self._worker_is_closed():
            self.close()


class _QuietChannel:
    """A gRPC channel without state notifications, see `ask`, and with a limit on clean-up calls.

    Finalizers make those calls, in any thread, so they must not wait for a worker that hangs.
    """

    def __init__(self, channel: grpc.Channel):
        self._channel = channel

    def subscribe(self, callback, try_to_connect=False):
        pass

    def unary_unary(self, method, *arguments, **options):
        call = self._channel.unary_unary(method, *arguments, **options)
        if method.rsplit("/", 1)[-1] in _CLEAN_UP:
            return functools.partial(call, timeout=_CLEAN_UP_SECONDS)
        return call

    def __getattr__(self, name):
        return getattr(self._channel, name)


class Stub(tff.framework.RemoteExecutorStub):
    """TFF's gRPC stub, with errors that say what happened and that TFF does not retry.

    TFF forever retries every call that fails with UNAVAILABLE, as calls to a dead worker do, or
    with FAILED_PRECONDITION.
    """

    def __init__(self, worker: Peer):
        self._worker = worker
        self._stub = tff.framework.RemoteExecutorGrpcStub(_QuietChannel(worker.channel))

    def is_closed(self) -> bool:
        return self._worker.closed

    def _call(self, method, request, lost=_LOST):
        self._worker.check()
        try:
            return method(request)
        except grpc.RpcError as error:
            code = error.code()
            if code in lost or _FORGOTTEN in (error.details() or ""):
                raise self._worker.lost(error) from error
            unknown = _newer_tensorflow.unknown_to_worker(error.details() or "")
            if unknown is not None:
                raise UnsupportedComputationError(unknown) from error
            reason = readable(error.details() or "")
            raise ComputationError(
                f"the computation failed in TFF's worker: {code.name}: {reason}"
            ) from error

    def _clean_up(self, method, request):
        # Runs in finalizers and after failures, where nobody could handle an error.
        if not self._worker.closed:
            # ValueError: the channel was closed meanwhile.
            with contextlib.suppress(grpc.RpcError, WorkerError, ValueError):
                self._worker.check()
                method(request)

    def get_executor(self, request):
        # The first call; a server that does not know it is not TFF's worker.
        return self._call(self._stub.get_executor, request, (*_LOST, grpc.StatusCode.UNIMPLEMENTED))

    def create_value(self, request):
        _newer_tensorflow.adapt_value(request.value)
        return self._call(self._stub.create_value, request)

    def create_struct(self, request):
        return self._call(self._stub.create_struct, request)

    def create_call(self, request):
        return self._call(self._stub.create_call, request)

    def create_selection(self, request):
        return self._call(self._stub.create_selection, request)

    def compute(self, request):
        return self._call(self._stub.compute, request)

    def dispose(self, request):
        return self._clean_up(self._stub.dispose, request)

    def dispose_executor(self, request):
        return self._clean_up(self._stub.dispose_executor, request)
