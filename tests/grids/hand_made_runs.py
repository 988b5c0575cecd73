"""Run directories as the trainer leaves them, written by hand, and a pool that makes such runs."""

import csv
import json
import pathlib

from grids import pool

from tff_fedlabel import training
from tff_fedlabel.training import stored_values


def write_run(path, config, test_accuracy, *, validation_accuracy=None, finished=True, **columns):
    """Writes a run.

    Args:
      path: The run directory.
      config: Its `RunConfig`.
      test_accuracy: One value for each round, None where it was not evaluated.
      validation_accuracy: The same; by default a tenth less.
      finished: Whether there is a summary.
      **columns: Further columns of metrics.csv.
    """
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if validation_accuracy is None:
        validation_accuracy = [None if a is None else a - 0.1 for a in test_accuracy]
    (path / "config.json").write_text(
        json.dumps({**stored_values.stored(config.choices()), "data": "0"})
    )
    columns = {
        "test_accuracy": test_accuracy,
        "validation_accuracy": validation_accuracy,
        **columns,
    }
    with (path / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["round", *columns])
        for index, row in enumerate(zip(*columns.values(), strict=True)):
            writer.writerow([index + 1, *("" if value is None else value for value in row)])
    if finished:
        summary = {
            "rounds": config.rounds,
            "test_accuracy": test_accuracy[-1],
            "seconds_per_round": 0.5,
        }
        (path / "summary.json").write_text(json.dumps(summary))


class _Ended:
    """A process that has ended."""

    def __init__(self, code):
        self.returncode = code

    def poll(self):
        return self.returncode

    def terminate(self):
        pass


class FakePool(pool.Pool):
    """Writes runs in place of training them.

    Attributes:
      accuracies: A function from a cell to the test accuracy of each round; None fails.
      started: The names of the cells that were started.
    """

    accuracies = None

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.started = []
        type(self).last = self

    def start(self, cell, cores):
        self.started.append(cell.name)
        accuracies = type(self).accuracies(cell)
        if accuracies is None:
            log = cell.log(self.root)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("something\nrun_tff.py: it broke\n")
            return _Ended(1)
        write_run(cell.directory(self.root), cell.config, accuracies)
        return _Ended(0)


def config(algorithm="fedlabel", **choices):
    return training.make_config("digits", algorithm, **{"rounds": 4, **choices})
