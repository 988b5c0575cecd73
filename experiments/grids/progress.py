"""What is shown while cells run, and the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

import tqdm


class Estimate:
    """How long the rest takes, from what the rounds of each algorithm took so far.

    Args:
      jobs: How many cells run at once.
    """

    def __init__(self, jobs: int):
        self._jobs = jobs
        self._seen: dict[str, tuple[str, int, float]] = {}

    def note(self, cell: str, algorithm: str, rounds: int, seconds: float) -> None:
        """A cell has done so many rounds in so many seconds since it was started here."""
        if rounds > 0:
            self._seen[cell] = algorithm, rounds, seconds

    def left(self, remaining: Mapping[str, tuple[str, int]]) -> float | None:
        """Seconds until all is done; None while nothing is known.

        Args:
          remaining: Cell -> its algorithm and the rounds that it has yet to do.
        """
        if not self._seen:
            return None
        rates = {name: self._rate(name) for name in {a for a, _, _ in self._seen.values()}}
        mean = self._rate(None)
        each = [rounds * rates.get(name, mean) for name, rounds in remaining.values()]
        if not each:
            return 0.0
        # No sooner than the longest of them.
        return max(sum(each) / self._jobs, max(each))

    def _rate(self, algorithm: str | None) -> float:
        """Seconds a round, of one algorithm or of all."""
        seen = [(r, s) for name, r, s in self._seen.values() if algorithm in (None, name)]
        return sum(s for _, s in seen) / sum(r for r, _ in seen)


def duration(seconds: float | None) -> str:
    """A time to read: "40 s", "12 min", "3 h 05 min"."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class Progress:
    """A bar on a terminal; elsewhere a line for each cell that ends, and one every few minutes.

    Args:
      cells: How many there are in all.
      rounds: How many rounds they have in all.
    """

    _LINE_EVERY = 300.0

    def __init__(self, cells: int, rounds: int):
        self._cells, self._rounds = cells, rounds
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=rounds,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rounds{postfix}",
            )
        self._last_line = time.monotonic()

    def show(self, finished: int, failed: int, rounds_done: int, left: float | None) -> None:
        """How far all of it is."""
        text = f"{finished}/{self._cells} runs, {duration(left)} left"
        if failed:
            text += f", {failed} failed"
        if self._bar is not None:
            self._bar.n = rounds_done
            self._bar.set_postfix_str(text, refresh=True)
        elif time.monotonic() - self._last_line >= self._LINE_EVERY:
            self.say(f"{rounds_done}/{self._rounds} rounds, {text}")

    def say(self, line: str) -> None:
        """A line that stays."""
        self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
