"""Runs cells, several at once, each as a process of its own on cores of its own."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from grids import cells as grid_cells
from grids import child
from grids.progress import Estimate, Progress, duration
from tff_fedlabel import command_line, training

_POLL = 0.5  # seconds


@dataclasses.dataclass(frozen=True)
class Failure:
    """A cell that ended without its result.

    Attributes:
      cell: Its name.
      reason: One line.
    """

    cell: str
    reason: str


class Stopped(Exception):
    """SIGINT or SIGTERM arrived; the runs have written their checkpoints.

    Attributes:
      signal_number: The signal.
    """

    def __init__(self, signal_number: int, finished: int, total: int, what: str = "runs"):
        super().__init__(
            f"stopped with {finished} of {total} {what} finished; the same command continues."
        )
        self.signal_number = signal_number


def share_cores(jobs: int, cores: Sequence[int]) -> list[list[int]]:
    """Divides the cores among the jobs, as evenly as it goes.

    Raises:
      UsageError: There are fewer cores than jobs.
    """
    if not 1 <= jobs <= len(cores):
        raise command_line.UsageError(
            f"--jobs must be 1 to {len(cores)}, the cores that this process may use, got {jobs}"
        )
    bounds = [len(cores) * job // jobs for job in range(jobs + 1)]
    return [list(cores[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


@dataclasses.dataclass
class _Running:
    cell: grid_cells.Cell
    process: subprocess.Popen
    cores: list[int]
    before: int  # rounds that were done when it was started
    started: float


class Pool:
    """Runs cells.

    Args:
      root: The directory of the grid.
      jobs: How many run at once.
      flags: Flags of run_tff.py that all of them get besides their choices.
      lock: The descriptor of the grid's lock.

    Attributes:
      root: The directory of the grid.
      failures: The cells that failed so far, in order.
      shares: The cores of each job.
      estimate: How long the rest takes.

    Raises:
      UsageError: There are fewer cores than jobs.
    """

    def __init__(
        self, root: str | os.PathLike, jobs: int, flags: Sequence[str] = (), lock: int = -1
    ):
        self.root = pathlib.Path(root)
        self.shares = share_cores(jobs, sorted(os.sched_getaffinity(0)))
        self._flags, self._lock = list(flags), lock
        self.estimate = Estimate(jobs)
        self.failures: list[Failure] = []

    def run(self, cells: Sequence[grid_cells.Cell], later: int = 0, what: str = "runs") -> set[str]:
        """Runs what is not finished, and waits for it.

        Args:
          cells: The cells; a failure of one does not stop the others.
          later: Rounds that are known to follow after these cells, for the time left.
          what: What the cells are called on the screen.

        Returns:
          The names of the cells that are finished now.

        Raises:
          Stopped: See there.
          RunDirectoryError: The directory of a cell holds another run.
        """
        cells = grid_cells.by_name(cells)
        finished = {cell.name for cell in cells if cell.is_finished(self.root)}
        todo = [cell for cell in cells if cell.name not in finished]
        if not todo:
            return finished
        rounds = sum(cell.config.rounds for cell in cells) + later
        show = Progress(len(cells), rounds)
        done = f", {len(finished)} of them finished already" if finished else ""
        show.say(f"{what}: {len(cells)}{done}; {len(self.shares)} at once")
        work = _Work(self, todo, finished, show, (len(cells), rounds), later, what)
        with contextlib.closing(show), _Signals() as signals:
            work.run(signals)
        return finished

    def start(self, cell: grid_cells.Cell, cores: list[int]) -> subprocess.Popen:
        """Starts a cell's process."""
        log = cell.log(self.root)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, child.__file__),
            *(str(os.getpid()), ",".join(map(str, cores)), str(self._lock)),
            *cell.flags(),
            *self._flags,
            *("--resume", f"--output_dir={cell.directory(self.root)}"),
        ]
        with log.open("w") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[self._lock] if self._lock >= 0 else [],
                # Ctrl-C reaches this process only, which passes it on once.
                start_new_session=True,
            )


class _Work:
    """One call of `Pool.run`."""

    def __init__(self, pool, todo, finished, show, totals, later, what):
        self._pool, self._finished, self._show, self._what = pool, finished, show, what
        self._waiting = collections.deque(todo)
        self._done_before = {cell.name: cell.rounds_done(pool.root) for cell in todo}
        self._free = list(pool.shares)
        self._running: list[_Running] = []
        (self._total, self._rounds), self._later = totals, later
        self._failed = 0

    def run(self, signals: _Signals) -> None:
        try:
            while self._waiting or self._running:
                if signals.received is not None:
                    self._stop(signals)
                while self._waiting and self._free:
                    self._start(self._waiting.popleft(), self._free.pop(0))
                time.sleep(_POLL)
                for running in list(self._running):
                    if running.process.poll() is not None:
                        self._end(running)
                self._tell()
        finally:
            for running in self._running:  # Only after an error here.
                running.process.terminate()

    def _start(self, cell, cores) -> None:
        process = self._pool.start(cell, cores)
        before = self._done_before[cell.name]
        self._running.append(_Running(cell, process, cores, before, time.monotonic()))

    def _end(self, running: _Running) -> None:
        self._running.remove(running)
        self._free.append(running.cores)
        cell, code = running.cell, running.process.returncode
        self._note(running)
        reason = _reason(code, cell.log(self._pool.root))
        found: dict[str, Any] = {}
        if reason is None:
            try:
                found = self._result(cell)
            except training.RunDirectoryError as error:
                reason = str(error)
        number = len(self._finished) + self._failed + 1
        if reason is None:
            self._finished.add(cell.name)
            took = duration(time.monotonic() - running.started)
            text = f"validation accuracy {found['validation_accuracy']:.4f}, "
            text += f"{found['seconds_per_round']:.2f} s a round, {took}"
        else:
            self._failed += 1
            self._pool.failures.append(Failure(cell.name, reason))
            text = f"failed: {reason}"
        self._show.say(f"[{number}/{self._total}] {cell.name}: {text}")

    def _result(self, cell: grid_cells.Cell) -> dict[str, Any]:
        """What a run gave whose process ended well; raises `RunDirectoryError` without a result."""
        if not cell.is_finished(self._pool.root):
            raise training.RunDirectoryError("ended without a result")
        return grid_cells.result(cell.directory(self._pool.root))

    def _note(self, running: _Running) -> int:
        """Takes down how far a cell is; returns its rounds."""
        rounds = running.cell.rounds_done(self._pool.root)
        seconds = time.monotonic() - running.started
        algorithm = running.cell.config.algorithm
        self._pool.estimate.note(running.cell.name, algorithm, rounds - running.before, seconds)
        return rounds

    def _tell(self) -> None:
        remaining = {
            cell.name: (cell.config.algorithm, cell.config.rounds - self._done_before[cell.name])
            for cell in self._waiting
        }
        for running in self._running:
            left = running.cell.config.rounds - self._note(running)
            remaining[running.cell.name] = running.cell.config.algorithm, left
        if self._later:
            remaining["later"] = "", self._later
        left = sum(rounds for _, rounds in remaining.values())
        self._show.show(
            len(self._finished),
            self._failed,
            self._rounds - left,
            self._pool.estimate.left(remaining),
        )

    def _stop(self, signals: _Signals) -> None:
        """Ends the running cells and raises `Stopped`."""
        for running in self._running:
            running.process.terminate()
        self._show.say(f"stopping {len(self._running)} runs after their checkpoints")
        for running in self._running:
            while running.process.poll() is None:
                if signals.count > 1:  # The user is in a hurry: what is on disk is whole.
                    running.process.kill()
                time.sleep(0.1)
        self._running = []
        raise Stopped(signals.received, len(self._finished), self._total, self._what)


def _reason(code: int, log: pathlib.Path) -> str | None:
    """Why a process failed, None if it did not."""
    if code == 0:
        return None
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), f"exit code {code}")
    return last.removeprefix("run_tff.py: ")


class _Signals:
    """Notes SIGINT and SIGTERM inside a `with` block."""

    def __init__(self):
        self.received: int | None = None
        self.count = 0
        self._previous: dict[int, object] = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number, _):
        self.received = number if self.received is None else self.received
        self.count += 1


def describe(failures: Sequence[Failure]) -> Iterator[str]:
    """The lines that a command ends with."""
    yield f"{len(failures)} run{'s' if len(failures) > 1 else ''} failed:"
    for failure in failures:
        yield f"  {failure.cell}: {failure.reason}"
