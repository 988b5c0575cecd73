"""A comparison: methods x labelled fractions x alphas x seeds, and what is written about it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import pandas as pd

from grids import accounting, cells, figures, search, tables
from grids.pool import Pool
from grids.settings import Settings
from grids.tables import Row
from tff_fedlabel import training


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
      settings: What is the same in all runs.
      rows: The rows of the table, in order.
      labeled_fractions, alphas: The columns are all pairs of them.
      accounting: One of `accounting.ACCOUNTINGS`.
      search: What is searched for, or None.
      search_columns: "each" column by itself, or only the "first", for all.
    """

    settings: Settings
    rows: Sequence[Row]
    labeled_fractions: Sequence[float]
    alphas: Sequence[float]
    accounting: str
    search: search.Search | None = None
    search_columns: str = "each"

    @property
    def columns(self) -> list[tuple[float, float]]:
        return [(fraction, alpha) for fraction in self.labeled_fractions for alpha in self.alphas]

    def cell(self, row: Row, column: tuple[float, float], seed: int, **more: Any) -> cells.Cell:
        """A run.

        Raises:
          ValueError: Its choices are wrong.
        """
        fraction, alpha = column
        shared = self.settings.choices_for(row.algorithm)
        if row.all_labels:
            shared.pop("labels_at", None)  # They are everywhere.
        own = {
            "labeled_fraction": 1.0 if row.all_labels else fraction,
            "alpha": alpha,
            "seed": seed,
        }
        task = self.settings.task
        config = training.make_config(task, row.algorithm, **{**shared, **own})
        own |= cells.unusual(config, more)
        own |= accounting.steps(config, self.accounting, row.all_labels)
        return cells.make_cell(task, row.algorithm, shared, own)

    def final_cells(self, values: dict | None = None) -> dict[tuple, cells.Cell]:
        """(row, column, seed) -> the run that is reported, without those that have no value.

        Args:
          values: (row, column) -> what was found for `search.name`; None before the search.
        """
        found = {}
        for row in self.rows:
            for column in self.columns:
                more = {}
                if self._is_searched(row):
                    if values is not None and self._searched_at(row, column) not in values:
                        continue
                    value = self.search.values[0]
                    if values is not None:
                        value = values[self._searched_at(row, column)]
                    more = {self.search.name: value}
                for seed in self.settings.seeds:
                    found[row, column, seed] = self.cell(row, column, seed, **more)
        return found

    def check(self) -> None:
        """Raises `ValueError` where the choices of a run are wrong, before anything runs."""
        for cell in self.final_cells().values():
            cell.is_finished(self.settings.output_dir)
        for row, column in self._keys():
            for value in self.search.values:
                self._trial((row, column), value).is_finished(self.settings.output_dir)

    def run(self, pool: Pool) -> list[pathlib.Path]:
        """Searches, runs what is missing, and writes what there is to say; returns the files."""
        values = {}
        if self.search is not None:
            cells_after = self.final_cells().values()
            later = sum(cell.config.rounds for cell in cells.by_name(list(cells_after)))
            values, trials = search.run(
                self.search, pool, self._trial, self._keys(), later, self._key_name
            )
            found = search.table(self.search, values, trials, self._columns_of)
            if len(found):
                tables.write_csv(self._path("search.csv"), found)
        final = self.final_cells(values)
        finished = pool.run(list(final.values()))
        runs = self.table({key: c for key, c in final.items() if c.name in finished})
        return self.write(runs) if len(runs) else []

    def table(self, finished: dict[tuple, cells.Cell]) -> pd.DataFrame:
        """One row for each run: what it is in the table, its choices, and its result."""
        rows = []
        for (row, (fraction, alpha), seed), cell in finished.items():
            config = cell.config
            own = {} if self.search is None else {self.search.name: self._value(cell)}
            rows.append(
                {
                    "group": row.group,
                    "row": row.label,
                    "algorithm": row.algorithm,
                    "labels_at": config.labels_at,
                    "accounting": self.accounting,
                    "labeled_fraction": fraction,
                    "alpha": alpha,
                    "seed": seed,
                    "rounds": config.rounds,
                    "tau": config.tau,
                    "tau_unlabeled": config.tau_unlabeled,
                    "lr": config.lr,
                    **own,
                    **cells.result(cell.directory(self.settings.output_dir)),
                    "run": cell.name,
                }
            )
        return pd.DataFrame(rows)

    def write(self, runs: pd.DataFrame) -> list[pathlib.Path]:
        """Writes the table (CSV, Markdown), the runs and the curves (CSV, PNG); returns the files.

        Args:
          runs: What `table` returned; not empty.
        """
        summary = tables.summarize(runs)
        tables.write_csv(self._path("runs.csv"), runs)
        tables.write_csv(self._path("table.csv"), summary)
        text = tables.markdown(summary, self.rows, self.columns, len(self.settings.seeds))
        tables.write_text(self._path("table.md"), f"{text}\n{self._caption(runs)}\n")
        curves = [
            self._curve(run.run).assign(row=run.row, labeled_fraction=fraction, alpha=alpha, seed=s)
            for run, fraction, alpha, s in zip(
                runs.itertuples(), runs.labeled_fraction, runs.alpha, runs.seed, strict=True
            )
        ]
        curves = pd.concat(curves)
        tables.write_csv(self._path("curves.csv"), curves)
        figures.curves(self._panels(curves), self._path("curves.png"))
        names = ["table.md", "table.csv", "runs.csv", "curves.csv", "curves.png"]
        names += ["search.csv"] if self.search is not None else []
        return [self._path(name) for name in names]

    def _curve(self, name: str) -> pd.DataFrame:
        metrics = training.StoredRun(self.settings.output_dir / "runs" / name).metrics
        columns = [column for column in _CURVES if column in metrics]
        return metrics.loc[metrics["test_accuracy"].notna(), ["round", *columns]]

    def _panels(self, curves: pd.DataFrame) -> dict[str, list[figures.Line]]:
        panels: dict[str, list[figures.Line]] = {}
        for (fraction, alpha), panel in curves.groupby(list(tables.COLUMN), sort=False):
            title = f"{self.settings.name}, {100 * fraction:g}% labels, alpha {alpha:g}"
            panels[title] = [
                figures.Line(label, [run.set_index("round")["test_accuracy"] for _, run in seeds])
                for label, seeds in (
                    (label, line.groupby("seed"))
                    for label, line in panel.groupby("row", sort=False)
                )
            ]
        return panels

    def _caption(self, runs: pd.DataFrame) -> str:
        over = tables.over_seeds(len(self.settings.seeds))
        text = f"Test accuracy in per cent, {over}: the mean of the last quarter of a run's "
        config = self.cell(self.rows[0], self.columns[0], self.settings.seeds[0]).config
        text += f"evaluations. {tables.size(config)}. "
        text += f"Accounting: {_ACCOUNTED[self.accounting]}."
        if self.search is not None:
            found = runs.groupby("row", sort=False)[self.search.name].unique()
            searched = {row.label for row in self.rows if self._is_searched(row)}
            values = [
                f"{label} {' or '.join(map(cells.text, values))}"
                + ("" if label in searched else " (given)")
                for label, values in found.items()
            ]
            text += f" {self.search.name} by a search on validation images: {', '.join(values)}."
        return text + _lost(runs)

    def _path(self, suffix: str) -> pathlib.Path:
        name = f"{self.settings.name}_{self.accounting}_{suffix}"
        return self.settings.results_dir / name

    def _is_searched(self, row: Row) -> bool:
        """Whether the row has the parameter that is searched for, and no value of its own of it."""
        if self.search is None:
            return False
        if self.search.name in self.settings.by_method.get(row.algorithm, {}):
            return False
        first = self.cell(row, self.columns[0], self.settings.seeds[0])
        return self.search.name in first.config.choices() or self.search.name in vars(
            first.config.algorithm_config()
        )

    def _searched_at(self, row: Row, column: tuple) -> tuple:
        if row.all_labels:  # The same in all columns of an alpha.
            column = (self.columns[0][0], column[1])
        return row, self.columns[0] if self.search_columns == "first" else column

    def _keys(self) -> list[tuple]:
        rows = [row for row in self.rows if self._is_searched(row)]
        keys = [self._searched_at(row, column) for row in rows for column in self.columns]
        return list(dict.fromkeys(keys))

    def _trial(self, key: tuple, value: Any) -> cells.Cell:
        row, column = key
        more = {"rounds": self.search.rounds, self.search.name: value}
        trial = self.cell(row, column, self.settings.seeds[0], **more)
        return dataclasses.replace(trial, folder="trials")

    def _columns_of(self, key: tuple) -> dict[str, Any]:
        row, (fraction, alpha) = key
        fraction = 1.0 if row.all_labels else fraction
        return {"row": row.label, "labeled_fraction": fraction, "alpha": alpha}

    def _key_name(self, key: tuple) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._columns_of(key).items())

    def _value(self, cell: cells.Cell) -> Any:
        return cells.effective(cell.config).get(self.search.name)


def _lost(runs: pd.DataFrame) -> str:
    """Which runs have likely diverged: their accuracy says nothing of the method."""
    lost = [
        f"{run.row} ({100 * run.labeled_fraction:g}% labels, alpha {run.alpha:g}, seed {run.seed}: "
        f"{run.lost_rounds} rounds)"
        for run in runs[runs["lost_rounds"] > 0].itertuples()
    ]
    if not lost:
        return ""
    return f" Diverged, no client's update was finite in some rounds: {', '.join(lost)}."


_CURVES = (
    "test_accuracy",
    "validation_accuracy",
    "kept_fraction",
    "local_fraction",
    "agreement_fraction",
    "pseudo_label_accuracy",
)
_ACCOUNTED = {
    accounting.ONE_PASS: "one pass (supervised methods take tau labelled steps, the others tau "
    "labelled and tau' unlabelled ones; with all labels, tau + tau')",
    accounting.EQUAL_STEPS: "equal steps (supervised methods take tau + tau' labelled steps)",
}
