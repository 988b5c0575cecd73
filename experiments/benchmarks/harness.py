"""Timing in turn, the table of figures, and the runtimes under comparison."""

import contextlib
import csv
import dataclasses
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import tqdm

from tff_fedlabel import _replacing

COLUMNS = (
    "benchmark",
    "size",
    "quantity_a",
    "quantity_b",
    "unit",
    "median_a",
    "median_b",
    "ratio",
    "ratio_min",
    "ratio_max",
    "goal",
    "met",
    "repeats",
    "cpu",
    "cores",
    "gpu",
    "tensorflow",
    "tff",
    "onednn",
    "command",
)
# Two rows that agree in these are the same figure: the newer one replaces the older.
_KEY = ("benchmark", "size", "quantity_a", "quantity_b", "cpu", "cores", "gpu")
_WARM_UPS = 2
_SHOWN = COLUMNS[1:13]


@dataclasses.dataclass(frozen=True)
class Goal:
    """An upper limit of the ratio, or of the median of A.

    Attributes:
      limit: The largest value that meets the goal.
      of: "ratio" or "A".
    """

    limit: float
    of: str = "ratio"

    def __str__(self) -> str:
        return f"{self.of} <= {self.limit:g}"


class Table:
    """Figures of one benchmark, each written to the CSV file as soon as it is there.

    Args:
      benchmark: The name in the first column.
      command: How to measure the figures again.
      path: The CSV file, shared by all benchmarks, or None for the screen only.
      hardware: What `hardware()` says.
    """

    def __init__(
        self,
        benchmark: str,
        command: str,
        path: str | os.PathLike | None,
        hardware: Mapping[str, str],
    ):
        self._fixed = {"benchmark": benchmark, "command": command, **hardware}
        self._path = None if path is None else pathlib.Path(path)
        self._rows: list[dict[str, str]] = []

    def add(
        self,
        size: str,
        quantity_a: str,
        quantity_b: str,
        unit: str,
        a: Sequence[float],
        b: Sequence[float],
        goal: Goal | None = None,
    ) -> None:
        """Records the ratio of A to B.

        Args:
          size: The size of the problem.
          quantity_a: What A is; with `quantity_b` and the size it names the figure.
          quantity_b: What B is.
          unit: Of both.
          a: One value for each turn.
          b: One value for each turn; a value and its neighbour in `a` were measured in one turn.
          goal: What the figure should reach.
        """
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        ratio, median_a = statistics.median(ratios), statistics.median(a)
        met = ""
        if goal is not None:
            met = "yes" if {"ratio": ratio, "A": median_a}[goal.of] <= goal.limit else "no"
        row = {
            **self._fixed,
            "size": size,
            "quantity_a": quantity_a,
            "quantity_b": quantity_b,
            "unit": unit,
            "median_a": f"{median_a:.4g}",
            "median_b": f"{statistics.median(b):.4g}",
            "ratio": f"{ratio:.3f}",
            "ratio_min": f"{min(ratios):.3f}",
            "ratio_max": f"{max(ratios):.3f}",
            "goal": "" if goal is None else str(goal),
            "met": met,
            "repeats": str(len(ratios)),
        }
        _replace(self._rows, row)
        if self._path is not None:
            rows = read(self._path)
            _replace(rows, row)
            _write(self._path, rows)
        say(f"  {size}: {quantity_a} / {quantity_b} = {row['ratio']} {met and f'({met})'}")

    def __str__(self) -> str:
        lines = [_SHOWN, *([row[column] for column in _SHOWN] for row in self._rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def _replace(rows: list[dict[str, str]], row: dict[str, str]) -> None:
    for index, other in enumerate(rows):
        if all(other[column] == row[column] for column in _KEY):
            rows[index] = row
            return
    rows.append(row)


def read(path: str | os.PathLike) -> list[dict[str, str]]:
    """The rows of a table; none where there is no file.

    Raises:
      ValueError: The file is something else.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    message = f"{path} is not a table of benchmarks; choose another --output"
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ValueError(message)
            return list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(message) from error


def _write(path: pathlib.Path, rows: list[dict[str, str]]) -> None:
    with _replacing.replacing(path) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def hardware() -> dict[str, str]:
    """The columns of the table that say where it was measured; imports TensorFlow."""
    import tensorflow as tf

    model = "unknown"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    gpus = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "unknown")
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    return {
        "cpu": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "gpu": ", ".join(gpus) or "none",
        "tensorflow": tf.__version__,
        "tff": metadata.version("tensorflow-federated"),
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "default"),
    }


def peak_mb(pid: int) -> float:
    """The most memory that a process has held at once, in MB."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def in_turn(functions: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, list[float]]:
    """Times all functions once, then all of them again, and so on.

    In turn, so that other work of the machine slows all of them alike. Turns before the first
    one do not count: in one they compile, and TFF's worker, which makes another TensorFlow session
    whenever all are busy, may compile again in the next.

    Args:
      functions: Name -> what to time.
      repeats: The number of turns.

    Returns:
      Name -> seconds of each turn.
    """
    seconds = {name: [] for name in functions}
    turns = tqdm.trange(-_WARM_UPS, repeats, desc="turns", leave=False, disable=None)
    for turn in turns:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


class Runner:
    """A started runtime that is TFF's context during its own calls only.

    Attributes:
      label: Its name in the table.
    """

    def __init__(self, label: str, handle):
        self.label = label
        self._handle = handle

    def call(self, function: Callable, *arguments):
        """`function(*arguments)` with this runtime as TFF's context."""
        import tensorflow_federated as tff

        with tff.framework.get_context_stack().install(self._handle.context):
            return function(*arguments)

    def round(self, process, client_data) -> Callable[[], Any]:
        """A function that runs the first round of `process` on `client_data`.

        Always the first one: the work of later rounds depends on what the earlier ones learned.
        """
        import numpy as np

        state = self.call(process.initialize)

        def one_round():
            output = self.call(process.next, state, client_data)
            # Waits for an accelerator; on a CPU the weights are there already.
            return [np.asarray(w) for w in output.state.global_model_weights.trainable]

        return one_round


@contextlib.contextmanager
def runners(*names: str) -> Iterator[list[Runner]]:
    """Starts runtimes side by side, so that they can be timed in turn."""
    from tff_fedlabel import runtime

    with contextlib.ExitStack() as stack:
        started: list[Runner] = []
        for name in names:
            handle = stack.enter_context(runtime.use(name))
            again = any(runner.label == name for runner in started)
            started.append(Runner(f"{name} (again)" if again else name, handle))
        yield started
