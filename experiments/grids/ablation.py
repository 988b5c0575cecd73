"""Ablations: what a choice changes, one figure each, as the paper has them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from grids import accounting, cells, figures, tables
from grids.pool import Pool
from grids.settings import Settings
from tff_fedlabel import algorithms, command_line, training
from tff_fedlabel.training import config as configuration


@dataclasses.dataclass(frozen=True)
class Ablation:
    """What is varied.

    Attributes:
      name: What its files are called.
      parameter: The choice along the axis of the figure.
      values: Its values.
      by: A second choice, which makes the lines of the figure; None is one line.
      by_values: Its values.
      source: The place in the paper.
    """

    name: str
    parameter: str
    values: tuple[Any, ...]
    by: str | None = None
    by_values: tuple[Any, ...] = (None,)
    source: str = ""


def of_the_paper(strong_augment: str) -> dict[str, Ablation]:
    """The paper's ablations by name. Where its figures show no values, they are ours.

    Args:
      strong_augment: The strong augmentation of the task, which is compared with none.
    """
    return {
        ablation.name: ablation
        for ablation in (
            Ablation(
                "consistency_weight",
                "consistency_weight",
                (0.0, 0.1, 0.5, 1.0, 2.0),
                source="lambda_0 of eq. loc-glob2, fig:globlocabl",
            ),
            Ablation("tau", "tau", (1, 5, 10, 20), source="fig:abloc"),
            Ablation(
                "threshold",
                "threshold",
                (0.1, 0.3, 0.5, 0.7, 0.9),
                source="beta of eq. pseul, fig:threshold",
            ),
            Ablation("confidence", "confidence", ("variance", "entropy"), source="h of eq. pseul0"),
            Ablation(
                "strong_augment",
                "threshold",
                (0.1, 0.5, 0.9),
                by="strong_augment",
                by_values=(strong_augment, "none"),
                source="fig:aug",
            ),
            Ablation(
                "selection", "selection", ("local", "global", "adaptive"), source="tab:locgloabl"
            ),
            Ablation(
                "labeled_fraction", "labeled_fraction", (0.05, 0.1, 0.2, 0.5), source="fig:moti"
            ),
            Ablation("alpha", "alpha", (0.1, 0.5, 1.0, 10.0), source="tab:testacc, tab:testacc_a1"),
        )
    }


def parse(text: str, known: dict[str, Ablation], read: Callable[[str, str], Any]) -> Ablation:
    """An ablation from "threshold", "tau=5,10" or "threshold=.1,.9/strong_augment=single,none".

    Args:
      text: What was given.
      known: The ablations that a name stands for.
      read: (name, text) -> value, as the flag of that name reads it.

    Raises:
      UsageError: It is not of that form, or of a choice that there is not.
    """
    if text in known:
        return known[text]
    parts = [part.partition("=") for part in text.split("/")]
    if len(parts) > 2 or not all(name and equals and values for name, equals, values in parts):
        raise command_line.UsageError(
            f"--vary must be one of {', '.join(known)}, or like tau=5,10 or "
            f"threshold=.1,.9/strong_augment=single,none, got {text!r}"
        )
    read_parts = [
        (name, tuple(dict.fromkeys(read(name, value) for value in values.split(","))))
        for name, _, values in parts
    ]
    varied = [name for name, _ in read_parts]
    if "seed" in varied:
        raise command_line.UsageError("--vary cannot vary seed; give --seeds, over which it means")
    if len(set(varied)) < len(varied):
        raise command_line.UsageError(f"--vary has {varied[0]} twice in {text!r}")
    (parameter, values), *by = read_parts
    if not by:
        return Ablation(parameter, parameter, values)
    return Ablation(f"{parameter}_by_{by[0][0]}", parameter, values, *by[0])


def has(algorithm: str, name: str) -> bool:
    """Whether a choice makes a difference to a method."""
    fields = {f.name for f in dataclasses.fields(algorithms.METHODS[algorithm].config_class)}
    if name in fields:
        return True
    if name == "tau_unlabeled":
        return not accounting.is_supervised(algorithm)
    of_a_run = {f.name for f in dataclasses.fields(training.RunConfig)}
    return name in of_a_run and name not in configuration.AUGMENTS


def fits(algorithm: str, ablation: Ablation) -> bool:
    """Whether all that an ablation varies makes a difference to a method."""
    return all(has(algorithm, name) for name in (ablation.parameter, ablation.by) if name)


@dataclasses.dataclass(frozen=True)
class Ablations:
    """Some ablations of some methods on one task.

    Attributes:
      settings: What is the same in all runs.
      algorithms: The methods; those that do not have a choice are left out of its figure.
      ablations: What is varied, each by itself.
    """

    settings: Settings
    algorithms: Sequence[str]
    ablations: Sequence[Ablation]

    def cells_of(self, ablation: Ablation) -> dict[tuple, cells.Cell]:
        """(method, value of `by`, value, seed) -> its run.

        Raises:
          UsageError: None of the methods has the choice.
          ValueError: A value is wrong.
        """
        varied = [name for name in (ablation.parameter, ablation.by) if name]
        able = [name for name in self.algorithms if fits(name, ablation)]
        if not able:
            raise command_line.UsageError(
                f"{' or '.join(varied)} makes no difference to {', '.join(self.algorithms)}"
            )
        return {
            (algorithm, line, value, seed): self._cell(
                algorithm, dict(zip(varied, (value, line), strict=False)), seed
            )
            for algorithm in able
            for line in ablation.by_values
            for value in ablation.values
            for seed in self.settings.seeds
        }

    def _cell(self, algorithm: str, varied: dict[str, Any], seed: int) -> cells.Cell:
        shared = self.settings.choices_for(algorithm)
        config = training.make_config(self.settings.task, algorithm, **shared)
        own = {**cells.unusual(config, varied), "seed": seed}
        return cells.make_cell(self.settings.task, algorithm, shared, own)

    def all_cells(self) -> list[cells.Cell]:
        """Every run once."""
        found = [c for ablation in self.ablations for c in self.cells_of(ablation).values()]
        return cells.by_name(found)

    def check(self) -> None:
        """Raises `ValueError` where the choices of a run are wrong, before anything runs."""
        for cell in self.all_cells():
            cell.is_finished(self.settings.output_dir)

    def run(self, pool: Pool) -> list[pathlib.Path]:
        """Runs what is missing, and writes tables and figures; returns the files."""
        return self.write(pool.run(self.all_cells()))

    def write(self, finished: set[str]) -> list[pathlib.Path]:
        """Writes table (CSV, Markdown) and figure of each ablation; returns the files.

        Args:
          finished: The names of the runs that are finished; others are left out.
        """
        files = []
        for ablation in self.ablations:
            runs = self.table(ablation, finished)
            if not len(runs):
                continue
            path = self.settings.results_dir / f"{self.settings.name}_{ablation.name}"
            files += [path.with_name(f"{path.name}{suffix}") for suffix in (".csv", ".md", ".png")]
            tables.write_csv(files[-3], runs)
            tables.write_text(files[-2], self._markdown(ablation, runs))
            figures.over_values(_lines(runs), files[-1], xlabel=ablation.parameter)
        return files

    def table(self, ablation: Ablation, finished: set[str]) -> pd.DataFrame:
        """One row for each run: line, value, seed, its result."""
        rows = []
        for (algorithm, line, value, seed), cell in self.cells_of(ablation).items():
            if cell.name not in finished:
                continue
            label = algorithm if ablation.by is None else f"{algorithm}, {ablation.by} {line}"
            found = cells.result(cell.directory(self.settings.output_dir))
            rows.append({"line": label, "value": value, "seed": seed, **found, "run": cell.name})
        table = pd.DataFrame(rows)
        return table.rename(columns={"value": ablation.parameter})

    def _markdown(self, ablation: Ablation, runs: pd.DataFrame) -> str:
        lines = [
            ["", *(cells.text(value) for value in ablation.values)],
            ["---"] * (1 + len(ablation.values)),
        ]
        for label, values in _lines(runs).items():
            texts = [
                tables.mean_text(values.get(value, ()), len(self.settings.seeds))
                for value in ablation.values
            ]
            lines.append([label, *texts])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        source = f" ({ablation.source})" if ablation.source else ""
        over = tables.over_seeds(len(self.settings.seeds))
        what = (
            ablation.parameter if ablation.by is None else f"{ablation.by} by {ablation.parameter}"
        )
        config = next(iter(self.cells_of(ablation).values())).config
        size = tables.size(config, without=(ablation.parameter, ablation.by))
        about = ", ".join(filter(None, (f"{what}{source}", self.settings.name, size)))
        return (
            f"{about}: test accuracy in per cent, {over}: the mean of the last quarter of a run's "
            f"evaluations.\n\n{table}\n"
        )


def _lines(runs: pd.DataFrame) -> dict[str, dict[Any, list[float]]]:
    """Line -> value -> test accuracy of each seed that has one."""
    parameter = runs.columns[1]
    found: dict[str, dict[Any, list[float]]] = {}
    for line, value, accuracy in zip(
        runs["line"], runs[parameter], runs["test_accuracy"], strict=True
    ):
        of_line = found.setdefault(line, {})
        if not pd.isna(accuracy):
            of_line.setdefault(value, []).append(accuracy)
    return found
