"""The table of all methods: one run of each and seed, what it gave, and what the method needs."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import deployment_table
import numpy as np
from costs import subject, traffic

from grids import cells, tables
from grids.pool import Pool
from grids.settings import FLAGS, Settings
from tff_fedlabel import algorithms, runtime, training

_LABELS = {
    "every_client": "some of each client's images",
    "some_clients": "all images of some clients",
    "server": "images at the server",
}
_HEADER = ("method", "test accuracy, %", "s a round", "KB down", "KB up", "labels", "runtimes")


@dataclasses.dataclass(frozen=True)
class Methods:
    """The methods of a table.

    Attributes:
      settings: What is the same in all runs.
      names: The methods, in order.
      output: The Markdown file.
    """

    settings: Settings
    names: Sequence[str]
    output: pathlib.Path

    def cell(self, name: str, seed: int) -> cells.Cell:
        """A method's run, with the task's and its own defaults."""
        shared = self.settings.choices_for(name)
        return cells.make_cell(self.settings.task, name, shared, {"seed": seed})

    def cells(self) -> dict[tuple[str, int], cells.Cell]:
        """(method, seed) -> its run."""
        seeds = self.settings.seeds
        return {(name, seed): self.cell(name, seed) for name in self.names for seed in seeds}

    def check(self) -> None:
        """Raises `ValueError` where the choices of a run are wrong, before anything runs."""
        for cell in self.cells().values():
            cell.is_finished(self.settings.output_dir)

    def run(self, pool: Pool) -> list[pathlib.Path]:
        """Runs what is missing and writes the table."""
        finished = pool.run(list(self.cells().values()))
        results = {
            key: cells.result(cell.directory(self.settings.output_dir))
            for key, cell in self.cells().items()
            if cell.name in finished
        }
        if not results:
            return []
        tables.write_text(self.output, self.text(results))
        return [self.output]

    def text(self, results: Mapping[tuple[str, int], Mapping[str, Any]]) -> str:
        """The whole file.

        Args:
          results: (method, seed) -> `cells.result`; those that failed are left out. Not empty.
        """
        sent = {name: self._traffic(name) for name in dict.fromkeys(name for name, _ in results)}
        lines = [list(_HEADER), ["---"] * len(_HEADER)]
        lines += [self._row(name, results, sent.get(name)) for name in self.names]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        seeds = self.settings.seeds
        model = next(iter(sent.values())).model
        given = self.settings.choices or self.settings.by_method
        other = " but for the choices above" if given else ""
        return f"""# The methods

    {self._command()}

made it, on `{self.settings.task}` with the task's and each method's defaults{other}, {len(seeds)}
seed{"s" if len(seeds) > 1 else ""}. Accuracy is the mean of the last quarter of a run's
evaluations. KB are those of one client in a round, the model alone being {model / 1000:.0f}.
labels: which images have one.

{table}
"""

    def _row(self, name, results, sent: traffic.Traffic | None) -> list[str]:
        seeds = self.settings.seeds
        where = self.cell(name, seeds[0]).config.labels_at
        labels = _LABELS.get(where, where)
        if sent is None:  # All its runs failed.
            return [f"`{name}`", "failed", "", "", "", labels, ""]
        own = [results[name, seed] for seed in seeds if (name, seed) in results]
        accuracy = tables.mean_text([one["test_accuracy"] for one in own], len(seeds), digits=1)
        seconds = f"{np.median([one['seconds_per_round'] for one in own]):.2f}"
        kilobytes = (f"{number / 1000:.0f}" for number in (sent.down, sent.up))
        return [f"`{name}`", accuracy, seconds, *kilobytes, labels, _runtimes(name)]

    def _traffic(self, name) -> traffic.Traffic:
        """The bytes of a method, with the model and the data of the task."""
        config = self.cell(name, self.settings.seeds[0]).config
        experiment = training.build(config, FLAGS.data_dir)
        helpers = subject.num_helpers(experiment.method, experiment.initial_memory)
        return traffic.measure(
            experiment.process, experiment.model, experiment.initial_memory, helpers
        )

    def _command(self) -> str:
        parts = ["python", "experiments/methods_table.py", "--output_dir=runs/methods"]
        if list(self.names) != list(algorithms.METHODS):
            parts.append(f"--algorithms={','.join(self.names)}")
        parts.append(f"--seeds={','.join(map(str, self.settings.seeds))}")
        parts += [cells.flag(name, value) for name, value in self.settings.choices.items()]
        single = [
            f"{method}.{name}={value}"
            for method, choices in self.settings.by_method.items()
            for name, value in choices.items()
        ]
        parts += [f"--by_method={','.join(single)}"] if single else []
        return shlex.join(parts)


def _runtimes(name: str) -> str:
    """The runtimes that compile the method's process."""
    try:
        found = deployment_table.forms(algorithms.METHODS[name])
    except Exception as error:  # noqa: BLE001 (somebody's own method, on a model it does not know)
        return f"not known ({type(error).__name__} on a small linear model)"
    return ", ".join(f"`{known}`" for known in runtime.RUNTIMES if found[f"`{known}`"])
