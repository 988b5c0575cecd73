"""The files of one run; `loop` lists them."""

import contextlib
import errno
import fcntl
import functools
import json
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any

import numpy as np
import pandas as pd
import tensorflow_federated as tff
from absl import logging as absl_logging

from tff_fedlabel._replacing import is_left_over, remove_left_overs, replacing
from tff_fedlabel.training import partition_table, stored_values
from tff_fedlabel.training.config import RunConfig
from tff_fedlabel.training.same_run import MAY_DIFFER, PATHS, differences
from tff_fedlabel.training.stored_run import RunDirectoryError, readable, written_choices

_INITIAL_WEIGHTS = "initial_weights.npz"
_PARTITION = "partition.csv"
# What is written here in one step.
_FILES = ("config.json", "round.json", "summary.json", _INITIAL_WEIGHTS, _PARTITION)
_PACKAGES = ("tff-fedlabel", "tensorflow-federated", "tensorflow", "numpy", "keras-cv")


class RunDirectory:
    """Creates or opens a run directory, and writes files so that no crash leaves a partial one.

    Args:
      path: The directory; it is created if needed.
      config: The run's choices.
      resume: Whether an existing run there may be continued.
      runtime: Name of the runtime that computes the rounds from here on.
      runtime_options: Its options.

    Raises:
      RunDirectoryError: See there.
    """

    def __init__(
        self,
        path: pathlib.Path,
        config: RunConfig,
        resume: bool,
        runtime: str,
        runtime_options: Mapping[str, Any],
    ):
        self.path, self.config = path, config
        try:
            self._choices = stored_values.stored(config.choices())
        except ValueError as error:
            raise RunDirectoryError(str(error)) from error
        self._runtime = {"runtime": runtime}
        if runtime_options:
            # As they will be read back, for comparison with what is there.
            self._runtime["options"] = json.loads(json.dumps(dict(runtime_options), default=str))
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK):  # A run that is there can be read all the same.
                raise PermissionError(errno.EACCES, "it is read-only")
            self._lock()
            try:
                self._claim(resume)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write to {path} ({error.strerror}); choose another --output_dir."
            ) from error

    def _claim(self, resume: bool) -> None:
        """Makes sure that the directory is this run's, and removes what a crash left unfinished."""
        self._is_new = False
        if (self.path / "config.json").exists():
            self._check_same_run(resume)
        elif not all(map(is_left_over, self.path.iterdir())):
            raise RunDirectoryError(
                f"{self.path} is not empty and holds no run; choose another --output_dir."
            )
        else:
            versions = {package: metadata.version(package) for package in _PACKAGES}
            runtimes = [{"from_round": 0, **self._runtime}]
            started = {"versions": versions, "runtimes": runtimes}
            self._write_json("config.json", {**self._choices, **started})
            self._is_new = True
        for name in _FILES:
            remove_left_overs(self.path / name)
        for left_over in self.path.glob("checkpoints/*_temp*"):
            shutil.rmtree(left_over, ignore_errors=True)
        for left_over in self.path.glob("metrics.csv_temp*"):
            left_over.unlink(missing_ok=True)

    def _lock(self) -> None:
        """Keeps a second process out until this one ends or calls `close`."""
        self._descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise RunDirectoryError(
                f"another process is working on the run in {self.path}."
            ) from None

    def close(self) -> None:
        """Releases the directory to other processes."""
        os.close(self._descriptor)

    def discard_if_new(self) -> None:
        """Removes what `__init__` created, if the run did not start."""
        if self._is_new:
            for name in ("config.json", "run.log", _INITIAL_WEIGHTS, _PARTITION):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def check_rounds(self, done: int) -> None:
        """Raises `RunDirectoryError` if the run is past `rounds`; records what may differ."""
        if done > self.config.rounds:
            raise RunDirectoryError(
                f"the run in {self.path} has done {done} rounds, more than the "
                f"{self.config.rounds} requested."
            )
        config = json.loads((self.path / "config.json").read_text())
        now = {**config, **{name: getattr(self.config, name) for name in MAY_DIFFER}}
        if now != config:
            self._write_json("config.json", now)

    def note_start(self, done: int) -> None:
        """Records that the run continues from round `done`, and in which runtime."""
        config = json.loads((self.path / "config.json").read_text())
        # What another runtime computed from `done` on is computed again.
        with readable(self.path / "config.json", "restore its list of runtimes"):
            before = [entry for entry in config.get("runtimes", []) if entry["from_round"] < done]
        runtimes = list(before)
        if not before or {**self._runtime, "from_round": before[-1]["from_round"]} != before[-1]:
            runtimes.append({"from_round": done, **self._runtime})
        if runtimes != config.get("runtimes"):
            self._write_json("config.json", {**config, "runtimes": runtimes})
        text = f"{'resumed' if done else 'started'} at round {done} of {self.config.rounds}"
        text += f", runtime {self._runtime['runtime']}"
        if before and before[-1]["runtime"] != self._runtime["runtime"]:
            text += f" (before: {before[-1]['runtime']})"
        self.note(text)

    def _check_same_run(self, resume):
        if not resume:
            raise RunDirectoryError(
                f"{self.path} already holds a run; pass --resume (in Python: resume=True) to "
                "continue it or choose another --output_dir."
            )
        differing = differences(written_choices(self.path), self.config)
        if differing:
            raise RunDirectoryError(
                f"{self.path} holds a run of another configuration ({'; '.join(differing)}); "
                "choose another --output_dir."
            )

    def check_data(self, fingerprint: str) -> None:
        """Records which data the run uses; raises `RunDirectoryError` if that has changed."""
        config = json.loads((self.path / "config.json").read_text())
        there = config.get("data")
        if there is None:  # A new run, or one from before this was recorded.
            self._write_json("config.json", {**config, "data": fingerprint})
        elif there == fingerprint:
            paths = {name: getattr(self.config, name) for name in PATHS}
            if any(config[name] != path for name, path in paths.items()):  # It was moved.
                self._write_json("config.json", {**config, **paths})
        else:
            raise RunDirectoryError(
                f"the run in {self.path} was started with different data; pass its original "
                "--data_dir, or choose another --output_dir."
            )

    def note_data(self, source: Any, clients: Any) -> None:
        """Keeps what the pictures of a run, and those who use its model, must know about the data.

        Args:
          source: The `datasets.sources.Source`: shape of the images and names of the classes go to
            config.json.
          clients: The `FederatedData`: who holds which classes goes to partition.csv.
        """
        config = json.loads((self.path / "config.json").read_text())
        shape = [int(side) for side in source.train.x.shape[1:]]
        images = {"shape": shape, "class_names": [str(name) for name in source.label_names]}
        if config.get("images") != images:
            self._write_json("config.json", {**config, "images": images})
        if not (self.path / _PARTITION).exists():
            partition_table.of_clients(clients).write(self.path / _PARTITION)

    def initial_weights(self) -> list[np.ndarray] | None:
        """The weights of another run that this one started from; None if there are none yet.

        Raises:
          RunDirectoryError: The file is damaged.
        """
        path = self.path / _INITIAL_WEIGHTS
        if not path.exists():
            return None
        mending = "delete it to read the weights of init_from again, if that run is as it was"
        with readable(path, mending), np.load(path) as arrays:
            return [arrays[name] for name in sorted(arrays, key=int)]

    def keep_initial_weights(self, weights: Iterable[np.ndarray]) -> None:
        """Keeps a copy of what `init_from` gave: the other run may change or go away."""
        with replacing(self.path / _INITIAL_WEIGHTS) as partial, partial.open("wb") as file:
            np.savez(file, **{str(index): array for index, array in enumerate(weights)})

    def finished_summary(self) -> dict[str, Any] | None:
        """The summary of a finished run; None if rounds or the summary are missing.

        Raises:
          RunDirectoryError: The run has more rounds than requested, or summary.json is damaged.
        """
        path = self.path / "summary.json"
        if not path.exists():
            return None
        with readable(path, "delete it to have it written again"):
            summary = json.loads(path.read_text())
            rounds = int(summary["rounds"])
        if rounds < self.config.rounds:
            return None
        self.check_rounds(rounds)
        return summary

    def note_unfinished(self, metrics: dict[str, float], round_num: int) -> None:
        """Keeps the metrics of a round that is not in metrics.csv yet."""
        self._write_json("round.json", {"round": round_num, **metrics})

    def unfinished_round(self, done: int) -> dict[str, float] | None:
        """The metrics of round `done` if they are not in metrics.csv yet, else None."""
        path = self.path / "round.json"
        if not done or not path.exists() or any(done == n for n, _ in self.evaluated(None)):
            return None
        with readable(path, f"delete it to resume without the metrics of round {done}"):
            metrics = json.loads(path.read_text())
            if metrics.pop("round") != done:
                return None
            return {name: math.nan if v is None else float(v) for name, v in metrics.items()}

    def evaluated(self, done: int | None) -> list[tuple[int, float]]:
        """(round, validation accuracy) of the rows of metrics.csv, up to a round if one is given.

        The accuracy is NaN if the round was not evaluated.
        """
        path = self.path / "metrics.csv"
        if not path.exists():
            return []
        with readable(path, "restore it, or delete it to resume without the rows of past rounds"):
            # Exactly what was written: an accuracy must not beat its own copy.
            rows = pd.read_csv(path, float_precision="round_trip")
            if len(rows) and not pd.api.types.is_integer_dtype(rows["round"]):
                raise ValueError("column round must hold whole numbers")
            rows = rows if done is None else rows[rows["round"] <= done]
            accuracies = rows["validation_accuracy"].astype(float)
        return list(zip(rows["round"], accuracies, strict=True))

    def finish(self, summary) -> None:
        self._write_json("summary.json", summary)
        (self.path / "round.json").unlink(missing_ok=True)
        self.note(f"finished: test accuracy {summary['test_accuracy']:.4f}")

    def _write_json(self, name: str, content) -> None:
        # JSON has no NaN or infinity: they become null.
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in content.items()
        }
        with replacing(self.path / name) as partial:
            partial.write_text(json.dumps(finite, indent=2, allow_nan=False) + "\n")

    async def release(self, metrics: dict[str, float], round_num: int) -> None:
        """Adds the metrics of a round to metrics.csv, TensorBoard and run.log.

        Rounds that a resumed run computes again replace the earlier ones.
        """
        absl_logging.set_verbosity(absl_logging.INFO)  # tf.saved_model.save raises it.
        for manager in self._release_managers:
            await manager.release(metrics, key=round_num)

    @functools.cached_property
    def _release_managers(self) -> list[tff.program.ReleaseManager]:
        return [
            # WRITE replaces the file in one step; APPEND could leave half a row.
            tff.program.CSVFileReleaseManager(
                str(self.path / "metrics.csv"),
                save_mode=tff.program.CSVSaveMode.WRITE,
                key_fieldname="round",
            ),
            tff.program.TensorBoardReleaseManager(str(self.path / "tensorboard")),
            tff.program.LoggingReleaseManager(),
        ]

    def mean_seconds(self, start: int) -> float:
        """Mean of the `seconds` column of metrics.csv over the rounds that this process ran.

        Args:
          start: Number of rounds before; the first one after them compiles and is left out. Earlier
            ones may have run elsewhere; they count only if there are no others.
        """
        seconds = pd.read_csv(self.path / "metrics.csv")["seconds"]
        own = seconds[start:] if len(seconds) > start else seconds
        return float(own[1:].mean() if len(own) > 1 else own.mean())

    @contextlib.contextmanager
    def log(self) -> Iterator[None]:
        """Sends what absl logs to run.log."""
        handler = logging.FileHandler(self.path / "run.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger = absl_logging.get_absl_logger()
        level, propagate = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        # Only to the file, not to the screen.
        logger.propagate = False
        try:
            yield
        finally:
            logger.propagate = propagate
            logger.setLevel(level)
            logger.removeHandler(handler)
            handler.close()

    def note(self, text: str) -> None:
        """Adds a line to run.log."""
        absl_logging.set_verbosity(absl_logging.INFO)
        absl_logging.info("%s", text)
