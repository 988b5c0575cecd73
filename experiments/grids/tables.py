"""Tables of a comparison: one row for each run, means and deviations, the paper's layout."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence

import numpy as np
import pandas as pd

from grids import accounting
from tff_fedlabel import training
from tff_fedlabel._replacing import replacing

# The groups of the paper's tables, in its order, and after them those for labels elsewhere.
FULLY_LABELED = "Supervised, fully labelled"
_PLACES = {
    "every_client": "partially labelled",
    "server": "labels at the server",
    "some_clients": "some clients fully labelled",
}
_KINDS = ("Supervised", "Semi-supervised")
_GROUPS = [FULLY_LABELED, *(f"{kind}, {place}" for place in _PLACES.values() for kind in _KINDS)]
# Groups that use the same labels: the best row of both is set in bold.
_COMPARED = {f"{_KINDS[1]}, {place}": f"{_KINDS[0]}, {place}" for place in _PLACES.values()}
COLUMN = ("labeled_fraction", "alpha")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      algorithm: The method.
      all_labels: Whether all images of the clients have their labels.
      labels_at: Where its runs have their labels, as in `training.RunConfig`.
    """

    algorithm: str
    all_labels: bool = False
    labels_at: str = "every_client"

    @property
    def label(self) -> str:
        return f"{self.algorithm} (100%)" if self.all_labels else self.algorithm

    @property
    def group(self) -> str:
        if self.all_labels:
            return FULLY_LABELED
        kind = _KINDS[0] if accounting.is_supervised(self.algorithm) else _KINDS[1]
        return f"{kind}, {_PLACES[self.labels_at]}"


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows, by group as the paper has them."""
    return sorted(rows, key=lambda row: _GROUPS.index(row.group))


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean and deviation over the seeds.

    Args:
      runs: One row for each finished run, with columns group, row, labeled_fraction, alpha, seed
        and test_accuracy.

    Returns:
      Columns group, row, labeled_fraction, alpha, mean, deviation (of the sample, NaN for a single
      seed), seeds (how many have an accuracy), in the order of the rows that were given.
    """
    keys = ["group", "row", *COLUMN]
    grouped = runs.groupby(keys, sort=False, dropna=False)["test_accuracy"]
    found = grouped.agg(mean="mean", deviation=lambda values: values.std(ddof=1), seeds="count")
    return found.reset_index()


def markdown(
    summary: pd.DataFrame,
    rows: Sequence[Row],
    columns: Sequence[tuple[float, float]],
    seeds: int,
) -> str:
    """The table in the paper's layout: per cent, mean ± deviation, the best in bold.

    Args:
      summary: What `summarize` returned.
      rows: The rows, in order.
      columns: (labelled fraction, alpha) of each column.
      seeds: How many there should be; a cell that has fewer says so.
    """
    cells = {
        (r.group, r.row, r.labeled_fraction, r.alpha): (r.mean, r.deviation, r.seeds)
        for r in summary.itertuples()
    }
    bold = _best(cells)
    lines = [
        ["", "", *(_column_name(*column) for column in columns)],
        ["---"] * (2 + len(columns)),
    ]
    before = None
    for row in rows:
        texts = []
        for column in columns:
            key = (row.group, row.label, *column)
            texts.append(_text(*cells[key], seeds, bold=key in bold) if key in cells else "failed")
        lines.append([row.group if row.group != before else "", row.label, *texts])
        before = row.group
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _best(cells) -> set:
    """The keys of the best cell of each column, among the rows that use the same labels."""
    classes: dict[tuple, list] = {}
    for key in cells:
        group, _, *column = key
        classes.setdefault((_COMPARED.get(group, group), *column), []).append(key)
    best = set()
    for keys in classes.values():
        known = [key for key in keys if not math.isnan(cells[key][0])]
        if len(keys) < 2 or not known:
            continue
        # As they are shown: equal figures are equally good.
        highest = max(_percent(cells[key][0]) for key in known)
        best |= {key for key in known if _percent(cells[key][0]) == highest}
    return best


def _percent(share: float) -> str:
    return f"{100 * share:6.2f}"


def size(config: training.RunConfig, without: Sequence[str | None] = ()) -> str:
    """Rounds and clients of all runs of a table, for its caption; not those that it varies."""
    texts = {
        "rounds": f"{config.rounds} rounds",
        "num_clients": f"{config.num_clients} clients",
    }
    return ", ".join(text for name, text in texts.items() if name not in without)


def over_seeds(seeds: int) -> str:
    """What the figures of a table are, for its caption."""
    return f"over {seeds} seeds, ± their deviation (n - 1)" if seeds > 1 else "of one seed"


def mean_text(shares: Sequence[float], seeds: int, digits: int = 2) -> str:
    """The mean of some shares in per cent, ± their deviation.

    Args:
      shares: One for each seed that has one, NaN or left out where a run failed.
      seeds: How many there should be; if there are fewer, the text says so.
      digits: Decimal places.
    """
    known = pd.Series(shares, dtype=float).dropna()
    return _text(known.mean(), known.std(ddof=1), len(known), seeds, digits=digits)


def _text(
    mean: float, deviation: float, number: int, seeds: int, *, bold: bool = False, digits: int = 2
) -> str:
    if not number:
        return "failed"
    text = f"{100 * mean:.{digits}f}"
    text = f"**{text}**" if bold else text
    if not np.isnan(deviation):
        text += f" ± {100 * deviation:.{digits}f}"
    return text if number == seeds else f"{text} ({number} of {seeds} seeds)"


def _column_name(labeled_fraction: float, alpha: float | None) -> str:
    name = f"{100 * labeled_fraction:g}% labels"
    return name if alpha is None or pd.isna(alpha) else f"{name}, alpha {alpha:g}"


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file in one step."""
    with replacing(path) as partial:
        partial.write_text(text)


def write_csv(path: str | os.PathLike, table: pd.DataFrame) -> None:
    """Writes a table in one step, numbers with six digits."""
    with replacing(path) as partial:
        table.to_csv(partial, index=False, float_format="%.6g", lineterminator="\n")
