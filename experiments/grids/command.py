"""The course of a command that runs a grid: check, lock, run, write, tell what failed."""

from __future__ import annotations

import pathlib
import sys
from typing import Protocol

from grids import lock
from grids.pool import Pool, Stopped, describe
from grids.settings import Settings
from tff_fedlabel import command_line


class Grid(Protocol):
    """What a command runs."""

    settings: Settings

    def check(self) -> None:
        """Raises `ValueError` where the choices of a run are wrong, before anything runs."""

    def run(self, pool: Pool) -> list[pathlib.Path]:
        """Runs what is missing and writes tables and figures; returns the files."""


def run(grid: Grid, jobs: int, program: str) -> int:
    """Runs a grid; returns the exit code: 1 if runs failed, 130 or 143 if it was stopped."""
    common = grid.settings
    with command_line.wrong_values_are_usage():
        grid.check()
    for flag in ("output_dir", "results_dir"):
        command_line.check_output(flag, getattr(common, flag))
    with lock.locked(common.output_dir) as descriptor:
        pool = Pool(common.output_dir, jobs, common.flags, descriptor)
        try:
            files = grid.run(pool)
        except Stopped as stopped:
            print(f"{program}: {stopped}", file=sys.stderr)
            return 128 + stopped.signal_number
    for path in files:
        if path.suffix == ".md":
            print(path.read_text())
    for path in files:
        print(path)
    if pool.failures:
        print("\n".join(describe(pool.failures)), file=sys.stderr)
    return 1 if pool.failures else 0
