"""FedLabel and its baselines as `tff.learning` processes.

Submodules load on first use: importing this package costs nothing and says nothing.
"""

import atexit
import importlib
import os
import sys
from importlib import metadata

_TFF = "0.87.0"

_SUBMODULES = (
    "algorithms",
    "augmentation",
    "datasets",
    "models",
    "pseudo_labels",
    "runtime",
    "tasks",
    "training",
)
_FROM_ALGORITHMS = (
    "FedAvgConfig",
    "FedLabelConfig",
    "FedProxConfig",
    "build_fedavg",
    "build_fedlabel",
    "build_fedprox",
)

__all__ = [*_FROM_ALGORITHMS, *_SUBMODULES]


def _check_environment() -> None:
    try:
        found = metadata.version("tensorflow-federated")
    except metadata.PackageNotFoundError:
        found = None
    if found != _TFF:
        python = ".".join(map(str, sys.version_info[:2]))
        raise ImportError(
            f"tff_fedlabel needs tensorflow-federated {_TFF} but finds {found or 'none'} (Python "
            f"{python}). Install it with uv or from requirements.txt, on Python 3.10 or 3.11, as "
            "the README shows; a plain 'pip install tensorflow-federated' takes an old version "
            "on other Pythons."
        )


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(f"tff_fedlabel.{name}")
    if name in _FROM_ALGORITHMS:
        return getattr(importlib.import_module("tff_fedlabel.algorithms"), name)
    raise AttributeError(f"module 'tff_fedlabel' has no attribute {name!r}")


@atexit.register
def _end_tffs_own_context() -> None:
    if "tensorflow_federated" in sys.modules:
        importlib.import_module("tff_fedlabel.runtime.local").drop_default_context()


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


_check_environment()
__version__ = metadata.version("tff-fedlabel")
# TensorFlow reports CUDA libraries that it registers twice as errors, on every machine. Its C++
# log stays silent unless the user has said otherwise; failures reach Python as exceptions.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
