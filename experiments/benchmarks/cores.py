"""How well the device runtime uses several cores."""

import concurrent.futures
import contextlib
import functools
import os
import sys
from collections.abc import Sequence

from benchmarks import stacks
from benchmarks.harness import Goal, Table, in_turn


def cores(table: Table, script: str, options) -> None:
    """A round in one process with n cores against n independent processes with one core each.

    The independent processes compute whole rounds at the same time and share nothing, so the time
    of a round divided by n is what the machine has to give.

    Args:
      table: Gets a row each for one core, two, and all.
      script: The script that calls `stacks.probe` on `--probe`.
      options: The `setup.Options`.
    """
    available = sorted(os.sched_getaffinity(0))
    for number in sorted({1, min(2, len(available)), len(available)}):
        some = available[:number]
        together, alone = _seconds(some, script, options)
        table.add(
            f"{stacks.size_text(options.quick)}, {number} core{'s'[: number > 1]}",
            "device round",
            "round of independent processes with one core each, divided by the cores",
            "s",
            together,
            [seconds / number for seconds in alone],
            Goal(1.1),
        )


def _seconds(some: Sequence[int], script: str, options) -> tuple[list[float], list[float]]:
    """Of a round in one process, and in all processes with one core each, in each turn."""
    start = functools.partial(stacks.process, sys.executable, script, options.quick)
    with contextlib.ExitStack() as stack:
        together = stack.enter_context(start(some, share_cores=True))
        alone = [stack.enter_context(start([core])) for core in some]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(some)))
        seconds = in_turn(
            {
                "together": lambda: together("round"),
                "alone": lambda: list(pool.map(lambda request: request("round"), alone)),
            },
            options.repeats,
        )
    return seconds["together"], seconds["alone"]
