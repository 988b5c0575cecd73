"""One process of TFF's C++ worker: its lifetime, its output, and why it died.

* A supervising shell holds the read end of a pipe whose only write end is in this process:
  however this process ends, SIGKILL included, the pipe closes and the shell kills the worker.
* The worker runs in its own session, so a terminal's Ctrl-C reaches only Python.
* Its output goes to a file, whose last lines are quoted when something goes wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref

import grpc
import tensorflow_federated as tff

from tff_fedlabel.runtime import _exposure, _remote
from tff_fedlabel.runtime._runtime_errors import WorkerError

# The shell's arguments are the worker's command line. Standard input is the pipe that closes when
# Python ends, standard output tells Python the worker's id, standard error is the log. The shell
# waits for everything it starts, so that it leaves no zombie to process 1.
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

_POLL_SECONDS = 0.02
_ANSWER_SECONDS = 0.5
_DEATH_SECONDS = 5.0  # how long to wait for the process to die
_LOG_LINES = 4
_LOG_CHARACTERS = 600


class Worker:
    """One worker process and its supervisor; by default only loopback reaches it.

    Args:
      binary: The program; None for the one in TFF's package.
      max_concurrent_computation_calls: How many clients are computed at once; 0 for no limit.
      log_file: File that the output is appended to; None for a temporary one.
      port: The port to listen on; 0 for a free one.
      open_to: Further addresses by which the worker is reached, see `_exposure.Guard`.

    Raises:
      WorkerError: It could not be started.
    """

    def __init__(
        self,
        binary: str | os.PathLike | None = None,
        max_concurrent_computation_calls: int = 0,
        log_file: str | os.PathLike | None = None,
        *,
        port: int = 0,
        open_to: tuple[str, ...] = (),
    ):
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
            holder = self._resources.enter_context(_exposure.hold_port(port))
            self.port = holder.getsockname()[1]
            # From before the worker starts until after it ends, so that it is never exposed.
            self._guard = _exposure.Guard(self.port, open_to)
            self._resources.callback(self._guard.close)
            command = [
                os.path.abspath(binary),
                f"--port={self.port}",
                f"--max_concurrent_computation_calls={max_concurrent_computation_calls or -1}",
            ]
            self._start(command)
            self.channel = _remote.open_channel(f"127.0.0.1:{self.port}")
            self._resources.callback(self.channel.close)
        except BaseException:
            self.close()
            raise

    def _start(self, command: list[str]) -> None:
        # Warnings are worth quoting even if Python's own are silenced.
        verbose = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0" if verbose else "1"}
        # glibc's eight heaps per core never return what threads freed: the worker would grow by
        # 10% over 300 small rounds.
        environment.setdefault("MALLOC_ARENA_MAX", str(os.cpu_count() or 1))
        stop_read, self._stop_write = os.pipe()  # neither is inherited across exec
        try:
            _live.add(self)
            with self._guard.inherited() as listeners:
                self._supervisor = subprocess.Popen(
                    ["/bin/sh", "-c", _SUPERVISOR, "tff-worker", *command],
                    stdin=stop_read,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    env=environment,
                    start_new_session=True,
                    pass_fds=listeners,
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
        while not _remote.answered(_remote.ask(self.channel, _ANSWER_SECONDS, wait=True)):
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
        self._guard.refresh()

    @property
    def closed(self) -> bool:
        return self._closed

    def lost(self, error: grpc.RpcError) -> WorkerError:
        """The error to raise when a call did not reach a worker."""
        deadline = time.monotonic() + _DEATH_SECONDS
        while time.monotonic() < deadline:
            try:
                self.check()
            except WorkerError as dead:
                return dead
            time.sleep(_POLL_SECONDS)
        return WorkerError(
            f"TFF's worker runs but the call to it failed: {error.details()}{self._quoted_log()}"
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
        # A line makes the supervisor end the worker even if a forked child keeps its copy of the
        # pipe open.
        with contextlib.suppress(OSError):
            os.write(self._stop_write, b"stop\n")
        try:
            self._supervisor.wait(_DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            # The shell is suspended. Its session contains only what it started.
            os.killpg(self._supervisor.pid, signal.SIGKILL)
            self._supervisor.wait()

    def release_pipe(self) -> None:
        stop_write, self._stop_write = getattr(self, "_stop_write", None), None
        if stop_write is not None:
            os.close(stop_write)


# A forked child inherits the pipe's write end, and would keep the worker alive after we end.
_live: weakref.WeakSet[Worker] = weakref.WeakSet()


def _release_pipes_in_child() -> None:
    for worker in list(_live):
        worker.release_pipe()


os.register_at_fork(after_in_child=_release_pipes_in_child)


def _cause(status: int) -> str:
    """Why the worker died, from the exit status of the supervising shell, which is the worker's."""
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
