"""Curves and bars of runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import figure

from tff_fedlabel.training import pictures, report_figures

_MOST_IN_A_ROW = 3


@dataclasses.dataclass(frozen=True)
class Line:
    """Runs that differ in their seeds only.

    Attributes:
      label: What the legend calls them.
      runs: A column over the rounds for each run, indexed by round.
    """

    label: str
    runs: Sequence[pd.Series]


def new(panels: int, height: float = 3.6, share_y: bool = True) -> tuple[figure.Figure, list[Any]]:
    """A figure of some panels, and its axes."""
    columns = min(panels, _MOST_IN_A_ROW)
    rows = -(-panels // columns)
    picture = figure.Figure(figsize=(5 * columns, height * rows), layout="constrained")
    axes = picture.subplots(rows, columns, sharey=share_y, squeeze=False).ravel()
    for axis in axes[panels:]:
        axis.set_visible(False)
    return picture, list(axes[:panels])


def curves(
    panels: Mapping[str, Sequence[Line]], path: str | os.PathLike, ylabel: str = "test accuracy"
) -> None:
    """Draws the mean over the seeds, and a band from the lowest to the highest of them.

    Args:
      panels: Title -> lines.
      path: The PNG to write.
      ylabel: What is drawn.
    """
    picture, axes = new(len(panels))
    labels = list(dict.fromkeys(line.label for lines in panels.values() for line in lines))
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for line in lines:
            color, style = report_figures.style(labels.index(line.label))
            together = pd.concat(line.runs, axis=1)
            marker = "o" if len(together) < 3 else None  # A single point is no line.
            axis.plot(
                together.index,
                together.mean(axis=1),
                color=color,
                linestyle=style,
                marker=marker,
                label=line.label,
            )
            if len(line.runs) > 1:
                low, high = together.min(axis=1), together.max(axis=1)
                axis.fill_between(together.index, low, high, color=color, alpha=0.15, linewidth=0)
        axis.set(title=title, xlabel="round")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(ylabel)
    legend(picture, axes)
    pictures.save(picture, path)


def legend(picture, axes) -> None:
    """One legend for all panels, below them."""
    found = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    columns = min(len(found), 4)
    picture.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False
    )


def bars(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    path: str | os.PathLike,
    ylabel: str = "test accuracy",
) -> None:
    """Draws the mean of each label, with the deviation over the seeds.

    Args:
      panels: Title -> label -> one value for each seed.
      path: The PNG to write.
      ylabel: What is drawn.
    """
    most = max(len(values) for values in panels.values())
    picture, axes = new(len(panels), height=max(2.2, 0.9 + 0.3 * most), share_y=False)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        positions = np.arange(len(values))[::-1]
        means = [np.mean(v) for v in values.values()]
        deviations = _deviations(values.values())
        axis.barh(positions, means, 0.7, xerr=deviations, color="tab:blue", capsize=3)
        for position, mean in zip(positions, means, strict=True):
            axis.text(0.005, position, f"{mean:.3f}", va="center", color="white", fontsize="small")
        axis.set_yticks(positions, list(values))
        axis.set(title=title, xlabel=ylabel)
        axis.grid(axis="x", alpha=0.3)
    pictures.save(picture, path)


def _deviations(values: Iterable[Sequence[float]]) -> list[float] | None:
    """The deviation of each over its seeds; None, for no bars, if all have one seed only."""
    values = list(values)
    if all(len(one) == 1 for one in values):
        return None
    return [float(np.std(one, ddof=1)) if len(one) > 1 else 0.0 for one in values]


def over_values(
    lines: Mapping[str, Mapping[Any, Sequence[float]]],
    path: str | os.PathLike,
    *,
    xlabel: str,
    ylabel: str = "test accuracy",
) -> None:
    """Draws a figure of an ablation: the mean over the seeds, with their deviation.

    Numbers become a line, in order and evenly spaced; words become bars beside each other.

    Args:
      lines: Label -> value of the parameter -> one value for each seed.
      path: The PNG to write.
      xlabel: The parameter.
      ylabel: What is drawn.
    """
    values = list(dict.fromkeys(value for line in lines.values() for value in line))
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    values = sorted(values) if numeric else values
    picture, (axis,) = new(1)
    picture.set_size_inches(5, 3.8)
    width = 0.8 / len(lines)
    for index, (label, line) in enumerate(lines.items()):
        color, style = report_figures.style(index)
        positions = np.array([values.index(value) for value in line], float)
        means = [np.mean(v) for v in line.values()]
        deviations = _deviations(line.values())
        if numeric:
            order = np.argsort(positions)
            axis.errorbar(
                positions[order],
                np.array(means)[order],
                None if deviations is None else np.array(deviations)[order],
                color=color,
                linestyle=style,
                marker="o",
                capsize=3,
                label=label,
            )
        else:
            positions += (index - (len(lines) - 1) / 2) * width
            axis.bar(
                positions, means, 0.9 * width, yerr=deviations, color=color, capsize=3, label=label
            )
    axis.set_xticks(range(len(values)), [f"{v:g}" if numeric else str(v) for v in values])
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.grid(axis="y", alpha=0.3)
    if len(lines) > 1:
        legend(picture, [axis])
    pictures.save(picture, path)
