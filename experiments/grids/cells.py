"""One run of a grid: its choices, where it lies, whether it is finished, what it gave."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tff_fedlabel import training
from tff_fedlabel.training import round_records, same_run, stored_run, stored_values

# Choices that a cell's name spells out, even where they are what the task says anyway.
_AXES = ("alpha", "labeled_fraction", "seed")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
      name: The name of its directory, unique for its choices within a grid.
      config: All its choices.
      choices: Those that differ from the task's, as `training.make_config` and the flags of
        run_tff.py take them.
      folder: Where in the grid's directory it lies: results in runs, trials of a search in trials.
    """

    name: str
    config: training.RunConfig = dataclasses.field(compare=False)
    choices: Mapping[str, Any] = dataclasses.field(compare=False)
    folder: str = "runs"

    def directory(self, root: str | os.PathLike) -> pathlib.Path:
        """The run directory."""
        return pathlib.Path(root) / self.folder / self.name

    def log(self, root: str | os.PathLike) -> pathlib.Path:
        """What the run wrote to the screen."""
        return pathlib.Path(root) / "logs" / f"{self.name}.log"

    def is_finished(self, root: str | os.PathLike) -> bool:
        """Whether all its rounds are done.

        Raises:
          RunDirectoryError: Its directory holds a run of other choices, or a damaged one.
        """
        path = self.directory(root)
        there = stored_run.written_choices(path)
        if not there:
            return False
        differing = same_run.differences(there, self.config)
        if differing:
            raise training.RunDirectoryError(
                f"{path} holds a run of other choices ({'; '.join(differing)}); choose another "
                "--output_dir, or delete that run."
            )
        summary = path / "summary.json"
        if not summary.exists():
            return False
        with stored_run.readable(summary, "delete it to have it written again"):
            found = json.loads(summary.read_text())
            rounds = int(found["rounds"])
            done = int(found.get("rounds_done", rounds))  # Fewer if it was stopped early.
        # More where a run that was finished goes on to a larger number of rounds.
        if self.rounds_done(root) < done:
            raise training.RunDirectoryError(
                f"{path}/metrics.csv is damaged: it ends in round {self.rounds_done(root)} of the "
                f"{done} that are done; restore it, or delete that run."
            )
        if rounds > self.config.rounds:
            raise training.RunDirectoryError(
                f"the run in {path} has done {rounds} rounds, more than the "
                f"{self.config.rounds} wanted; give --rounds {rounds} or another --output_dir."
            )
        return rounds == self.config.rounds

    def rounds_done(self, root: str | os.PathLike) -> int:
        """The rounds in its metrics.csv, 0 if there are none."""
        try:
            with (self.directory(root) / "metrics.csv").open(newline="") as file:
                rounds = [int(row["round"]) for row in csv.DictReader(file)]
        except (OSError, ValueError, KeyError, TypeError, csv.Error):
            return 0  # Only for the progress shown; the run itself says what is wrong.
        return max(rounds, default=0)

    def flags(self) -> list[str]:
        """Its choices as run_tff.py takes them."""
        given = {"task": self.config.task, "algorithm": self.config.algorithm, **self.choices}
        return [flag(name, value) for name, value in given.items()]


def flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={value}"


def make_cell(task: str, algorithm: str, shared: Mapping[str, Any], own: Mapping[str, Any]) -> Cell:
    """A cell.

    Args:
      task, algorithm: As `training.make_config` takes them.
      shared: Choices of all cells of the grid.
      own: Choices of this cell; they replace shared ones and make up its name.

    Raises:
      ValueError: A choice is wrong.
    """
    choices = {**shared, **own}
    config = training.make_config(task, algorithm, **choices)
    named = {name: getattr(config, name) for name in _AXES}
    named |= {name: value for name, value in own.items() if name not in _AXES}
    parts = [f"{name}_{text(value)}" for name, value in named.items()]
    return Cell("-".join([algorithm, *parts]), config, choices)


def effective(config: training.RunConfig) -> dict[str, Any]:
    """All that a run is made with, its method's parameters among it, whoever chose it."""
    return {**vars(config.algorithm_config()), **config.choices()}


def unusual(config: training.RunConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What of some choices a configuration does not have anyway.

    The rest is left out of a run's name, so that runs of the same choices are the same run.
    """
    usual = effective(config)
    return {name: value for name, value in chosen.items() if usual[name] != value}


def text(value: Any) -> str:
    """A choice in a name or on a label."""
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value).replace(os.sep, "_")


def by_name(cells: Sequence[Cell]) -> list[Cell]:
    """Each cell once; rows may have some in common.

    Raises:
      ValueError: Two runs of different choices have the same name.
    """
    found: dict[str, Cell] = {}
    for cell in cells:
        differing = same_run.differences(
            stored_values.stored(found.setdefault(cell.name, cell).config.choices()), cell.config
        )
        if differing:
            raise ValueError(
                f"two runs would have the same directory, {cell.name} ({'; '.join(differing)}); "
                "give them an --output_dir each."
            )
    return list(found.values())


def result(path: str | os.PathLike) -> dict[str, Any]:
    """What a finished run gave.

    Args:
      path: The run directory.

    Returns:
      test_accuracy, validation_accuracy: means over the last quarter of the run's evaluations;
      last_test_accuracy, last_validation_accuracy: those of the last one; evaluations: how many the
      means are over; lost_rounds, in which no client's update was finite; seconds_per_round.

    Raises:
      RunDirectoryError: It holds no run, or not a finished one, or a file of it is damaged.
    """
    run = training.StoredRun(path)
    if run.summary is None:
        raise training.RunDirectoryError(f"the run in {path} is not finished.")
    found: dict[str, Any] = {}
    for name in ("test_accuracy", "validation_accuracy"):
        known = evaluations(run.metrics, name)
        found[name] = float(last_quarter(known).mean()) if len(known) else math.nan
        found[f"last_{name}"] = float(known.iloc[-1]) if len(known) else math.nan
    found["evaluations"] = len(last_quarter(evaluations(run.metrics, "test_accuracy")))
    found["lost_rounds"] = int(np.sum(round_records.is_lost(run.metrics)))
    with stored_run.readable(run.path / "summary.json", "delete it to have it written again"):
        found["seconds_per_round"] = float(run.summary["seconds_per_round"])
    return found


def evaluations(metrics: pd.DataFrame, column: str) -> pd.Series:
    """A column of metrics.csv in the rounds that were evaluated, indexed by round."""
    if column not in metrics:
        return pd.Series([], dtype=float)
    values = pd.to_numeric(metrics.set_index("round")[column], errors="coerce")
    return values.dropna().astype(float)


def last_quarter(values: pd.Series) -> pd.Series:
    """The last quarter of some values, rounded up: at least one."""
    return values.iloc[len(values) - math.ceil(len(values) / 4) :]
