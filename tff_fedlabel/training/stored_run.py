"""Reads the files of a run directory, without TensorFlow: `loop` lists them."""

import contextlib
import csv
import json
import os
import pathlib
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from tff_fedlabel.training import stored_values

# What damaged files raise beside the usual exceptions.
_OF_FILES = (csv.Error, EOFError, zipfile.BadZipFile)
# What config.json holds besides the choices of a `RunConfig`; `parameters`, whose entries are there
# by themselves, only in runs of earlier versions.
_NOT_CHOICES = ("versions", "runtimes", "data", "images", "parameters")


class RunDirectoryError(ValueError):
    """A directory is not the run that is wanted: none, another one, or one not to be written to."""


@contextlib.contextmanager
def readable(path: pathlib.Path, mending: str) -> Iterator[None]:
    """Inside, whatever a damaged file leads to becomes a `RunDirectoryError` of one line."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OSError, *_OF_FILES) as error:
        problem = (str(error).strip().splitlines() or [""])[0]
        raise RunDirectoryError(
            f"{path} is damaged ({type(error).__name__}: {problem}); {mending}."
        ) from error


class StoredRun:
    """What a run has left so far; files that it lacks are None or empty.

    Args:
      path: The run directory.

    Attributes:
      path: The run directory.
      choices: The run's choices by name.
      config: All of config.json.
      metrics: metrics.csv, one row for each round, with a column `round`; perhaps empty.
      summary: summary.json, None if the run is not finished.
      client_accuracy: client_accuracy.csv, None if there is none.

    Raises:
      RunDirectoryError: There is no run, or a file of it cannot be read.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self.config = _stored_config(path)
        if not self.config:
            raise RunDirectoryError(f"{path} holds no run: there is no {path}/config.json.")
        self._check_config()
        self.choices = stored_choices(path)
        self.summary = self._read("summary.json", _read_summary)
        metrics = self._read("metrics.csv", _read_metrics)
        self.metrics = pd.DataFrame({"round": []}) if metrics is None else metrics
        self.client_accuracy = self._read("client_accuracy.csv", _read_client_accuracy)

    def _check_config(self) -> None:
        """Raises RunDirectoryError where what config.json holds besides the choices is unusable."""
        runtimes = self.config.get("runtimes", [])
        is_list = isinstance(runtimes, list) and all(isinstance(entry, dict) for entry in runtimes)
        for name, fits in (
            ("runtimes", is_list),
            ("versions", isinstance(self.config.get("versions", {}), dict)),
        ):
            if not fits:
                raise RunDirectoryError(
                    f"{self.path}/config.json is damaged: {name} cannot be used; restore it."
                )

    @property
    def rounds_done(self) -> int:
        """The last round in metrics.csv."""
        return int(self.metrics["round"].max()) if len(self.metrics) else 0

    def images(self) -> tuple[tuple[int, int, int], tuple[str, ...]] | None:
        """(height, width, channels) and the names of the classes; None in older runs."""
        images = self.config.get("images")
        if images is None:
            return None
        try:
            height, width, channels = map(int, images["shape"])
            return (height, width, channels), tuple(map(str, images["class_names"]))
        except (LookupError, TypeError, ValueError) as error:
            raise RunDirectoryError(
                f"{self.path}/config.json does not say what the images are: {error!r}."
            ) from error

    def _read(self, name: str, read) -> Any:
        path = self.path / name
        with readable(path, "restore it, or delete it to do without"):
            return read(path) if path.exists() else None


def _read_summary(path: pathlib.Path) -> dict[str, Any]:
    summary = json.loads(path.read_text())
    if not isinstance(summary, dict):
        raise ValueError("it does not hold results")
    return summary


def _read_metrics(path: pathlib.Path) -> pd.DataFrame | None:
    metrics = _read_table(path)
    if metrics is not None and len(metrics):
        _check_numbers(metrics, metrics.columns)
        if not pd.api.types.is_integer_dtype(metrics["round"]):
            raise ValueError("column round must hold whole numbers")
    return metrics


def _read_client_accuracy(path: pathlib.Path) -> pd.DataFrame | None:
    # As it is: a client may be called 007, or NA.
    as_written = {"keep_default_na": False, "na_values": {"accuracy": [""]}}
    rows = _read_table(path, dtype={"client": str}, **as_written)
    if rows is not None and len(rows):
        _check_numbers(rows, ["accuracy"])
        rows[["client", "part"]]  # KeyError without them
    return rows


def _read_table(path: pathlib.Path, **options: Any) -> pd.DataFrame | None:
    try:
        return pd.read_csv(path, float_precision="round_trip", **options)
    except pd.errors.EmptyDataError:
        return None


def _check_numbers(table: pd.DataFrame, columns: Iterable[str]) -> None:
    for column in columns:
        if not pd.api.types.is_numeric_dtype(table[column]):
            raise ValueError(f"column {column} must hold numbers")


def stored_choices(path: str | os.PathLike) -> dict[str, Any]:
    """The choices of the run in the directory `path`; empty if there is none.

    Raises:
      RunDirectoryError: config.json cannot be read.
    """
    return stored_values.restored(written_choices(path))


def written_choices(path: str | os.PathLike) -> dict[str, Any]:
    """The same in the form that config.json has."""
    choices = _stored_config(path)
    return {name: value for name, value in choices.items() if name not in _NOT_CHOICES}


def stored_runtime(path: str | os.PathLike) -> tuple[str, dict[str, Any]] | None:
    """The last runtime of the run in the directory `path` and its options; None if there is none.

    Raises:
      RunDirectoryError: config.json cannot be read.
    """
    runtimes = _stored_config(path).get("runtimes")
    if not runtimes:
        return None
    try:
        return runtimes[-1]["runtime"], dict(runtimes[-1].get("options", {}))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RunDirectoryError(f"{path}/config.json names no runtime: {error!r}.") from error


def _stored_config(path: str | os.PathLike) -> dict[str, Any]:
    try:
        config = json.loads((pathlib.Path(path) / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, OSError) as error:
        raise RunDirectoryError(
            f"{path}/config.json cannot be read: {error}; restore it, or delete the run."
        ) from error
    if not isinstance(config, dict):
        raise RunDirectoryError(
            f"{path}/config.json does not hold choices; restore it, or delete the run."
        )
    return config
