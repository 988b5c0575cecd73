"""Chooses a value, the learning rate for instance, on validation images by short runs."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pandas as pd

from grids import cells as grid_cells
from grids.pool import Failure, Pool
from tff_fedlabel import command_line

# Learning rates are scales: where the best is at the edge, the next ones by this factor are tried.
_SCALES = ("lr", "server_lr")
_FACTOR, _MOST_BEYOND = 2.0, 3


@dataclasses.dataclass(frozen=True)
class Search:
    """What is searched for.

    Attributes:
      name: The choice, a field of `training.RunConfig` or a parameter of methods.
      values: Those to try.
      rounds: Rounds of each trial.
      extend: Whether to go on beyond the values while the best is at the edge.
    """

    name: str
    values: tuple[Any, ...]
    rounds: int
    extend: bool = True


def parse(text: str, rounds: int, extend: bool, read: Callable[[str, str], Any]) -> Search:
    """A search from "lr=.05,.1,.2".

    Args:
      text: What was given.
      rounds, extend: See `Search`.
      read: (name, text) -> value, as the flag of that name reads it.

    Raises:
      UsageError: It is not of that form.
    """
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise command_line.UsageError(f"--search must be like lr=.05,.1,.2, got {text!r}")
    tried = dict.fromkeys(read(name, value) for value in values.split(","))
    return Search(name, tuple(tried), rounds, extend and name in _SCALES)


def run(
    search: Search,
    pool: Pool,
    cell_of: Callable[[Hashable, Any], grid_cells.Cell],
    keys: Sequence[Hashable],
    later: int,
    name_of: Callable[[Hashable], str] = str,
) -> tuple[dict[Hashable, Any], dict[Hashable, dict[Any, float]]]:
    """Runs the trials.

    Args:
      search: What is searched for.
      pool: What runs them.
      cell_of: (key, value) -> the trial's cell.
      keys: What a value is chosen for, each by itself.
      later: Rounds that follow after the search.
      name_of: What a key is called where its search fails.

    Returns:
      Key -> the value with the best validation accuracy, and key -> value -> that accuracy, the
      mean over the last quarter of the trial's evaluations. A key of which a trial failed, or none
      has an accuracy, has no best value; `pool.failures` says why.
    """
    trials: dict[Hashable, dict[Any, float]] = {key: {} for key in keys}
    failed: dict[Hashable, str] = {}
    wanted = {key: list(search.values) for key in keys}
    what = "trials of the search"
    while any(wanted.values()):
        cells = {(k, v): cell_of(k, v) for k, values in wanted.items() for v in values}
        finished = pool.run(list(cells.values()), later, what)
        for (key, value), cell in cells.items():
            if cell.name in finished:
                result = grid_cells.result(cell.directory(pool.root))
                trials[key][value] = result["validation_accuracy"]
            else:
                failed[key] = "a trial of its search failed"
        for key, found in trials.items():
            if all(map(math.isnan, found.values())):
                failed.setdefault(key, "no trial of its search has a validation accuracy")
        open_keys = [key for key in keys if key not in failed]
        wanted = {
            key: [v for v in beyond(trials[key], search) if _is_possible(cell_of, key, v)]
            for key in open_keys
        }
        what = f"further trials, for the best {search.name} is at the edge"
    for key, reason in failed.items():
        pool.failures.append(Failure(name_of(key), f"not run, for {reason}"))
    chosen = {key: best(trials[key]) for key in keys if key not in failed}
    for key, value in chosen.items():
        print(f"search: {name_of(key)}: {search.name} {grid_cells.text(value)}", file=sys.stderr)
    return chosen, trials


def _is_possible(cell_of, key, value) -> bool:
    """Whether a run may have the value: a learning rate has a largest one, for instance."""
    try:
        cell_of(key, value)
    except ValueError:
        return False
    return True


def best(trials: Mapping[Any, float]) -> Any:
    """The value of the best accuracy; of equals, the first; a NaN is the worst."""
    return max(trials, key=lambda value: -math.inf if math.isnan(trials[value]) else trials[value])


def beyond(trials: Mapping[Any, float], search: Search) -> list[Any]:
    """What to try next: nothing, or the value beyond the edge where the best is."""
    if not search.extend:
        return []
    low, high = min(search.values), max(search.values)
    chosen = best(trials)
    following = []
    if chosen == max(trials) and chosen < high * _FACTOR**_MOST_BEYOND:
        following.append(chosen * _FACTOR)
    if chosen == min(trials) and chosen > low / _FACTOR**_MOST_BEYOND:
        following.append(chosen / _FACTOR)
    return following


def table(
    search: Search,
    chosen: Mapping[Hashable, Any],
    trials: Mapping[Hashable, Mapping[Any, float]],
    columns_of: Callable[[Hashable], Mapping[str, Any]],
) -> pd.DataFrame:
    """One row for each trial: the columns of its key, value, validation accuracy, chosen."""
    rows = [
        {
            **columns_of(key),
            search.name: value,
            "validation_accuracy": accuracy,
            "chosen": key in chosen and chosen[key] == value,
        }
        for key, values in trials.items()
        for value, accuracy in sorted(values.items())
    ]
    return pd.DataFrame(rows)
