"""TFF's C++ worker on this machine, with its life, output and start-up in our hands.

TFF's own local context starts the same worker but lets it outlive Python, hands it Python's
standard output, waits for ever for one that died at start, and repeats for ever a call to one that
died later. Here

* a supervising shell holds the reading end of a pipe whose only writing end is in this process:
  however this process ends, SIGKILL included, the pipe closes and the shell kills the worker;
* the worker runs in a session of its own, so a terminal's Ctrl-C reaches Python alone;
* its output goes to a file, whose last lines are quoted when something goes wrong;
* start-up has a time limit, and a lost worker is a `WorkerError`.

The worker listens on every network interface and asks nobody for a password; TFF gives it no
option to do otherwise. Where others can reach this machine's ports, put a firewall in front.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator

import grpc
import tensorflow_federated as tff

# The shell's arguments are the worker's command line. Standard input is the pipe that closes when
# Python ends, standard output tells Python the worker's id, standard error is the log. Everything
# the shell starts is waited for, so that no zombie is left to whoever is process 1.
_SUPERVISOR = """
exec 3<&0 </dev/null
"$@" >&2 3<&- &
worker=$!
echo "$worker"
exec >/dev/null 2>&1
{ read -r stop; kill -9 "$worker"; } <&3 &
watch=$!
exec 3<&-
wait "$worker"
status=$?
kill -9 "$watch"
wait "$watch"
exit "$status"
"""

_MAX_MESSAGE_BYTES = 2 * 1000**3  # TFF's own figure; gRPC's default of 4 MB is less than a model
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A proxy named in the environment must not catch calls to our own machine.
    ("grpc.enable_http_proxy", 0),
    # Otherwise two channels in one process to a port used twice would share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)
_POLL_SECONDS = 0.02
_ANSWER_SECONDS = 0.5
_DEATH_SECONDS = 5.0  # how long a lost connection waits for the process to be seen dead
_LOG_LINES = 4
_LOG_CHARACTERS = 600


class WorkerError(RuntimeError):
    """TFF's worker did not start, or is gone. The message is one line and names the cause."""


class ComputationError(RuntimeError):
    """The worker is well, but the computation it ran failed.

    The message's first line says why; TensorFlow adds lines that say where.
    """


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
    for option, value in (
        ("default_num_clients", default_num_clients),
        ("max_concurrent_computation_calls", max_concurrent_computation_calls),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{option} is {value!r}; it must be an integer of 0 or more")
    if not isinstance(stream_structs, bool):
        raise ValueError(f"stream_structs is {stream_structs!r}; it must be True or False")
    number = isinstance(startup_timeout, int | float) and not isinstance(startup_timeout, bool)
    if not number or not 0 < startup_timeout < float("inf"):
        raise ValueError(f"startup_timeout is {startup_timeout!r}; it must be seconds above 0")
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
        thread = resources.enter_context(_EventLoopThread())
        worker = _Worker(worker_binary, max_concurrent_computation_calls, log_file)
        resources.callback(worker.close)
        worker.wait_until_ready(startup_timeout)
        yield LocalRuntime(worker, thread, default_num_clients, stream_structs)


class LocalRuntime:
    """The contexts of a running worker: `context` and `async_context`, each a normal TFF one."""

    def __init__(self, worker, thread, default_num_clients, stream_structs):
        self._worker = worker
        stub = _Stub(worker)

        def executor(cardinalities):
            cardinalities.setdefault(tff.CLIENTS, default_num_clients)
            executor = _Executor(stub, stream_structs)
            executor.set_cardinalities(cardinalities)
            return executor

        self.async_context = tff.framework.AsyncExecutionContext(
            tff.framework.ResourceManagingExecutorFactory(executor),
            tff.backends.native.desugar_and_transform_to_native,
            transform_args=tff.tensorflow.transform_args,
            transform_result=tff.tensorflow.transform_result,
        )
        self.context = _SyncContext(self.async_context, worker, thread)

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


class _SyncContext(tff.framework.SyncContext):
    """Waits for what the asynchronous context computes."""

    def __init__(self, async_context, worker, thread):
        self._async_context = async_context
        self._worker = worker
        self._thread = thread

    def invoke(self, comp, arg):
        self._worker.check()
        return self._thread.result(self._async_context.invoke(comp, arg))


class _EventLoopThread:
    """A thread that runs coroutines, and ends with its `with` block.

    TFF's own synchronous context never ends its thread; a search over many runs would pile up
    threads and open files.
    """

    def __enter__(self):
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="tff-local", daemon=True
        )
        self._thread.start()
        started.wait()
        return self

    async def _serve(self, started):
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        # Errors reach whoever asked for the result; the loop need not print them as well.
        self._loop.set_exception_handler(lambda loop, context: None)
        started.set()
        await self._stop.wait()

    def result(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def __exit__(self, *exception):
        if self._thread.is_alive():  # it is not in a forked child
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_DEATH_SECONDS)


class _Worker:
    """One worker process and its supervisor."""

    def __init__(self, binary, max_concurrent_computation_calls, log_file):
        if binary is None:
            binary = os.path.join(os.path.dirname(tff.__file__), "data", "worker_binary")
            if not os.access(binary, os.X_OK):
                raise WorkerError(f"TFF's worker is missing at {binary}; reinstall TFF")
        self._closed = False
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._resources = contextlib.ExitStack()
        try:
            self._log = self._resources.enter_context(
                open(log_file, "a+b") if log_file else tempfile.TemporaryFile("a+b")
            )
            self._log_start = self._log.seek(0, os.SEEK_END)
            self.port = self._reserve_port()
            command = [
                os.path.abspath(binary),
                f"--port={self.port}",
                f"--max_concurrent_computation_calls={max_concurrent_computation_calls or -1}",
            ]
            self._start(command)
            self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", _CHANNEL_OPTIONS)
            self._resources.callback(self.channel.close)
        except BaseException:
            self.close()
            raise

    def _reserve_port(self) -> int:
        # The worker shares its port with whoever asks to, so two workers given one port would
        # answer each other's calls. This socket, which never listens, keeps the port from being
        # given out again between here and the worker's end.
        holder = self._resources.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("", 0))
        return holder.getsockname()[1]

    def _start(self, command: list[str]) -> None:
        # Warnings are worth quoting even where Python's own are silenced.
        verbose = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0" if verbose else "1"}
        # glibc's eight heaps a core never give back what threads freed: the worker would grow by
        # 10% over 300 small rounds.
        environment.setdefault("MALLOC_ARENA_MAX", str(os.cpu_count() or 1))
        stop_read, self._stop_write = os.pipe()  # neither is inherited across exec
        try:
            _live.add(self)
            self._supervisor = subprocess.Popen(
                ["/bin/sh", "-c", _SUPERVISOR, "tff-worker", *command],
                stdin=stop_read,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(f"TFF's worker could not be started: {error}") from error
        finally:
            os.close(stop_read)
        with self._supervisor.stdout as said:
            first = said.readline()
        if not first.strip().isdigit():
            raise WorkerError(f"TFF's worker could not be started{self._quoted_log()}")
        self.pid = int(first)

    def wait_until_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        listening = False
        while not listening:
            self._raise_if_dead("died at start-up")
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                listening = True
            if not listening:
                self._wait_or_give_up(deadline, timeout, "it runs but does not listen on its port")
        # Whatever speaks gRPC answers a method it does not know. gRPC's own notices of readiness
        # come from a thread that prints a traceback when the channel is closed under it.
        ask = self.channel.unary_unary("/tff_fedlabel/AreYouThere")
        while True:
            try:
                ask(b"", timeout=_ANSWER_SECONDS, wait_for_ready=True)
                return
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    return
            self._raise_if_dead("died at start-up")
            self._wait_or_give_up(deadline, timeout, "it listens on its port but does not answer")

    def _wait_or_give_up(self, deadline: float, timeout: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise WorkerError(
                f"TFF's worker was not ready after {timeout:g} s: {what}{self._quoted_log()}"
            )
        time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        if self._closed:
            raise WorkerError("this runtime has ended: call computations inside its `with` block")
        self._raise_if_dead("died")

    @property
    def closed(self) -> bool:
        return self._closed

    def lost(self, error: grpc.RpcError) -> WorkerError:
        """The error to raise when a call found no worker at the other end."""
        deadline = time.monotonic() + _DEATH_SECONDS
        while time.monotonic() < deadline:
            try:
                self.check()
            except WorkerError as dead:
                return dead
            time.sleep(_POLL_SECONDS)
        return WorkerError(
            f"TFF's worker runs but the call to it broke off: {error.details()}{self._quoted_log()}"
        )

    def _raise_if_dead(self, what: str) -> None:
        status = self._supervisor.poll()
        if status is not None:
            raise WorkerError(f"TFF's worker {what}: {_cause(status)}{self._quoted_log()}")

    def log_tail(self) -> str:
        if self._log.closed:
            return ""
        end = os.fstat(self._log.fileno()).st_size
        start = max(self._log_start, end - 64 * 1024)
        text = os.pread(self._log.fileno(), end - start, start).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-_LOG_LINES:])[-_LOG_CHARACTERS:]

    def _quoted_log(self) -> str:
        tail = self.log_tail()
        return f"; its last output: {tail}" if tail else "; it wrote nothing"

    def close(self) -> None:
        """Ends the worker; may be called twice and from a forked child, where it does nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if hasattr(self, "_supervisor"):
                self._kill()
        finally:
            self.release_pipe()
            self._resources.close()

    def _kill(self) -> None:
        # A line asks the supervisor to end the worker even where a forked child that never let go
        # of its copy keeps the pipe open.
        with contextlib.suppress(OSError):
            os.write(self._stop_write, b"stop\n")
        try:
            self._supervisor.wait(_DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            # Somebody stopped the shell. Its session holds only what it started.
            os.killpg(self._supervisor.pid, signal.SIGKILL)
            self._supervisor.wait()

    def release_pipe(self) -> None:
        stop_write, self._stop_write = getattr(self, "_stop_write", None), None
        if stop_write is not None:
            os.close(stop_write)


# A forked child copies the pipe's writing end, and would keep the worker alive after we are gone.
_live: weakref.WeakSet[_Worker] = weakref.WeakSet()


def _release_pipes_in_child() -> None:
    for worker in list(_live):
        worker.release_pipe()


os.register_at_fork(after_in_child=_release_pipes_in_child)


def _cause(status: int) -> str:
    """What an exit status of the supervising shell, which is the worker's, tells."""
    if status in (126, 127):
        return "the program cannot be run on this machine"
    number = -status if status < 0 else status - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit status {status}"
    hint = {
        "SIGKILL": " (the kernel does so when memory runs out)",
        "SIGILL": " (this processor lacks instructions that TFF's build needs)",
    }.get(name, "")
    return f"killed by {name}{hint}"


class _Executor(tff.framework.RemoteExecutor):
    """TFF's executor, which also frees its memory in the worker when nobody uses it any more.

    TFF keeps the ten numbers of clients used last and forgets the others without closing them:
    each keeps about 10 MB and a dozen threads in the worker.
    """

    def __init__(self, stub: _Stub, stream_structs: bool):
        # Values are freed one by one rather than by the score: one may be a whole model.
        super().__init__(stub, dispose_batch_size=1, stream_structs=stream_structs)
        self._worker_is_closed = stub.is_closed

    def __del__(self):
        if not self._worker_is_closed():
            self.close()


class _QuietChannel:
    """A gRPC channel without notices of its state: see `_Worker.wait_until_ready`."""

    def __init__(self, channel: grpc.Channel):
        self._channel = channel

    def subscribe(self, callback, try_to_connect=False):
        pass

    def __getattr__(self, name):
        return getattr(self._channel, name)


class _Stub(tff.framework.RemoteExecutorStub):
    """TFF's gRPC stub, with errors that say what happened and that TFF does not retry.

    TFF repeats, for ever, every call that fails with UNAVAILABLE, which is what a dead worker looks
    like, or with FAILED_PRECONDITION.
    """

    def __init__(self, worker: _Worker):
        self._worker = worker
        self._stub = tff.framework.RemoteExecutorGrpcStub(_QuietChannel(worker.channel))

    def is_closed(self) -> bool:
        return self._worker.closed

    def _call(self, method, request):
        self._worker.check()
        try:
            return method(request)
        except grpc.RpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise self._worker.lost(error) from error
            raise ComputationError(
                f"the computation failed in TFF's worker: {code.name}: {error.details()}"
            ) from error

    def _clean_up(self, method, request):
        # Runs in finalizers and after failures, where nobody could handle an error.
        if not self._worker.closed:
            with contextlib.suppress(grpc.RpcError, WorkerError):
                self._worker.check()
                method(request)

    def get_executor(self, request):
        return self._call(self._stub.get_executor, request)

    def create_value(self, request):
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


class _NoContext(tff.framework.SyncContext):
    def invoke(self, comp, arg):
        raise RuntimeError("Python is ending: no computation can be run any more")


def drop_default_context() -> None:
    """Ends TFF's own local context; the package calls it when Python ends.

    Importing TFF installs that context. Left to the very end of Python its clean-up fails with a
    traceback and leaves its worker running.
    """
    tff.framework.set_default_context(_NoContext())
