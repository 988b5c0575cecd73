"""Runs an experiment: configuration, building, rounds, evaluation, the run directory.

    config = make_config("digits", "fedlabel", rounds=20)
    summary = run(config, "runs/mine")

Submodules load on first use, so that flags can be checked without TensorFlow.
"""

import importlib

_FROM = {
    "EPOCH": "config",
    "RunConfig": "config",
    "STRONG_AUGMENTS": "config",
    "make_config": "config",
    "Experiment": "experiment",
    "build": "experiment",
    "evaluate": "evaluation",
    "make_experiment": "own_experiment",
    "CheckpointError": "checkpoints",
    "ConfigError": "loop",
    "Interrupted": "interrupt",
    "run": "loop",
    "RunDirectoryError": "stored_run",
    "stored_choices": "stored_run",
    "stored_runtime": "stored_run",
    "StoredRun": "stored_run",
    "TrainedModel": "trained_model",
    "load_model": "trained_model",
    "export": "exporting",
    "find_images": "prediction",
    "predict": "prediction",
    "write_report": "report",
}

__all__ = [*_FROM]


def __getattr__(name: str):
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
