"""Figures of runs that are there already, whoever started them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps

from grids import cells, figures
from tff_fedlabel import tasks, training
from tff_fedlabel.datasets import partition_plot
from tff_fedlabel.training import partition_table, pictures

# What makes the panels of a figure; other choices make its lines.
_PANELS = ("labeled_fraction", "alpha")
_SELECTION = {
    "kept_fraction": "kept",
    "local_fraction": "local model chosen",
    "agreement_fraction": "both models agree",
    "pseudo_label_accuracy": "kept labels that are right",
}


def find_runs(paths: Iterable[str | os.PathLike]) -> list[training.StoredRun]:
    """The runs in run directories, and in directories of compare.py and ablate.py.

    Of runs with the same choices only the first counts.

    Raises:
      RunDirectoryError: There is no run, or a file cannot be read.
    """
    found = []
    for path in map(pathlib.Path, paths):
        inner = sorted(path.glob("runs/*/config.json"))
        if inner and not (path / "config.json").exists():
            found += [training.StoredRun(file.parent) for file in inner]
        else:
            found.append(training.StoredRun(path))
    by_choices: dict[str, training.StoredRun] = {}
    for run in found:
        for name in ("algorithm", "task"):
            if name not in run.choices:
                raise training.RunDirectoryError(
                    f"{run.path}/config.json names no {name}; restore it, or leave the run out."
                )
        by_choices.setdefault(repr(sorted(run.choices.items())), run)
    return list(by_choices.values())


class Runs:
    """Runs that are drawn together.

    Args:
      runs: At least one.
    """

    def __init__(self, runs: Sequence[training.StoredRun]):
        self.runs = list(runs)
        of_methods: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            of_methods.setdefault(run.choices["algorithm"], []).append(run.choices)
        self._differing = {name: _differing(found) for name, found in of_methods.items()}

    def label(self, run: training.StoredRun) -> str:
        """What tells a run from the others but for its seed and its panel.

        Choices are named where runs of the same method differ in them: those in which methods
        differ are mostly their defaults.
        """
        algorithm = run.choices["algorithm"]
        differing = [name for name in self._differing[algorithm] if name in run.choices]
        return ", ".join(
            [algorithm, *(f"{name} {cells.text(run.choices[name])}" for name in differing)]
        )

    def panel(self, run: training.StoredRun) -> str:
        """The title of a run's panel."""
        choices = run.choices
        task = tasks.absolute(choices["task"]) if os.sep in choices["task"] else choices["task"]
        text = f"{pathlib.Path(task).name}, {100 * choices['labeled_fraction']:g}% labels"
        return f"{text}, alpha {choices['alpha']:g}"

    def curves(self, path: pathlib.Path) -> None:
        """Test accuracy over the rounds."""
        panels: dict[str, dict[str, list]] = {}
        for run in self.runs:
            values = cells.evaluations(run.metrics, "test_accuracy")
            if len(values):
                lines = panels.setdefault(self.panel(run), {})
                lines.setdefault(self.label(run), []).append(values)
        _some(panels, "an evaluation")
        figures.curves(
            {
                title: [figures.Line(label, runs) for label, runs in lines.items()]
                for title, lines in panels.items()
            },
            path,
        )

    def bars(self, path: pathlib.Path) -> None:
        """Test accuracy, the mean of the last quarter of the evaluations."""
        panels: dict[str, dict[str, list[float]]] = {}
        for run in self.runs:
            values = cells.evaluations(run.metrics, "test_accuracy")
            if len(values):
                bars = panels.setdefault(self.panel(run), {})
                mean = float(cells.last_quarter(values).mean())
                bars.setdefault(self.label(run), []).append(mean)
        _some(panels, "an evaluation")
        figures.bars(panels, path)

    def selection(self, path: pathlib.Path) -> None:
        """What the methods did with the unlabelled images in each round, one panel for each run."""
        chosen = [run for run in self.runs if set(_SELECTION) & set(run.metrics.columns)]
        _some(chosen, "pseudo-labels")
        picture, axes = figures.new(len(chosen))
        for axis, run in zip(axes, chosen, strict=True):
            for (column, name), color in zip(
                _SELECTION.items(), ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=True
            ):
                if column in run.metrics:
                    values = run.metrics.set_index("round")[column]
                    axis.plot(values, color=color, label=name)
            seed = f", seed {run.choices['seed']}"
            axis.set_title(f"{self.label(run)}{seed}\n{self.panel(run)}", fontsize="small")
            axis.set(xlabel="round", ylim=(-0.02, 1.02))
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("share of the unlabelled images")
        figures.legend(picture, axes)
        pictures.save(picture, path)

    def partition(self, path: pathlib.Path) -> training.StoredRun:
        """Who holds which classes; of the first run that knows, which is returned."""
        run, table = self._table()
        title = f"{self.panel(run)}, {len(table.client_ids)} clients, seed {run.choices['seed']}"
        partition_plot.plot_partition(table, str(path), title=title)
        return run

    def mismatch(self, path: pathlib.Path, clients: int = 6) -> training.StoredRun:
        """Class shares of clients' labelled and unlabelled images beside those of all clients.

        Of the first run that knows them, which is returned.

        As in the paper's fig:moti2. The clients are evenly spaced from the largest to the smallest
        distance between their labelled and unlabelled shares.
        """
        run, table = self._table()
        unlabeled, labeled = table.class_counts("unlabeled"), table.class_counts("labeled")
        everyone = _shares(table.class_counts("all").sum(axis=0))
        distance = partition_plot.class_mismatch(table)
        order = [k for k in np.argsort(-distance, kind="stable") if not np.isnan(distance[k])]
        _some(order, "clients with labelled and unlabelled images")
        number = min(clients, len(order))
        picks = np.unique(np.linspace(0, len(order) - 1, number).round().astype(int))
        shown = [order[i] for i in picks]
        picture, axes = figures.new(len(shown), height=2.8)
        positions = np.arange(table.num_classes)
        colors = colormaps["tab10"].colors
        for axis, client in zip(axes, shown, strict=True):
            for offset, color, counts, name in (
                (-0.27, colors[1], labeled[client], "labelled"),
                (0.0, colors[0], unlabeled[client], "unlabelled"),
            ):
                axis.bar(positions + offset, _shares(counts), 0.27, color=color, label=name)
            axis.bar(positions + 0.27, everyone, 0.27, color="0.7", label="all clients' images")
            name = table.client_ids[client]
            axis.set_title(
                f"client {name}: labelled to unlabelled {distance[client]:.2f}, unlabelled to all "
                f"{_distance(_shares(unlabeled[client]), everyone):.2f}",
                fontsize="small",
            )
            if table.num_classes <= 20:
                axis.set_xticks(positions, table.label_names, rotation=90, fontsize="small")
            axis.grid(axis="y", alpha=0.3)
        axes[0].set_ylabel("share of the class")
        picture.suptitle(
            f"{self.panel(run)}: distance of class shares, 0 equal, 1 no class in common "
            f"(median over clients {np.nanmedian(distance):.2f})"
        )
        figures.legend(picture, axes)
        pictures.save(picture, path)
        return run

    def _table(self) -> tuple[training.StoredRun, partition_table.PartitionTable]:
        for run in self.runs:
            file = run.path / "partition.csv"
            if file.exists():
                table = partition_table.read(file)
                if table.unlabeled is not None:
                    return run, table
        raise ValueError("none of the runs knows the classes of its clients' images.")


def _differing(choices: Sequence[dict[str, Any]]) -> list[str]:
    """What runs differ in, but for seeds and panels."""
    same = ("seed", "task", "source", "algorithm", "client_accuracy", *_PANELS)
    names = dict.fromkeys(name for one in choices for name in one)
    return [
        name
        for name in names
        if name not in same and len({repr(one.get(name)) for one in choices}) > 1
    ]


def _shares(counts: np.ndarray) -> np.ndarray:
    return counts / max(counts.sum(), 1)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The total variation distance."""
    return float(0.5 * np.abs(a - b).sum())


def _some(things: Any, what: str) -> None:
    if not things:
        raise ValueError(f"none of the runs has {what}.")
