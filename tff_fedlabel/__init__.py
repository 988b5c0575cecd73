"""FedLabel and its baselines as `tff.learning` processes.

Submodules load on first use: importing this package costs nothing and says nothing.
"""

import atexit
import importlib
import sys
from importlib import metadata

import _tff_fedlabel_startup

from tff_fedlabel import _compatibility

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
# Beside these, `build_<method>` and the class of its parameters of every method in `algorithms`.
__all__ = [*_SUBMODULES]


def _check_environment() -> None:
    try:
        found = metadata.version("tensorflow-federated")
    except metadata.PackageNotFoundError:
        found = None
    if found != _TFF:
        raise ImportError(
            f"tff_fedlabel needs tensorflow-federated {_TFF} but finds {found or 'none'}; its own "
            "requirements can no longer be met, so: pip install --no-deps --ignore-requires-python "
            + " ".join(_compatibility.without_dependencies())
        )
    fault = _compatibility.known_fault()
    if fault is not None:
        print(f"tff_fedlabel: {fault}", file=sys.stderr)


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(f"tff_fedlabel.{name}")
    if name.startswith("build_") or name.endswith("Config"):
        algorithms = importlib.import_module("tff_fedlabel.algorithms")
        if hasattr(algorithms, name):
            return getattr(algorithms, name)
    raise AttributeError(f"module 'tff_fedlabel' has no attribute {name!r}")


@atexit.register
def _end_tffs_own_context() -> None:
    if "tensorflow_federated" in sys.modules:
        importlib.import_module("tff_fedlabel.runtime.local").drop_default_context()


def __dir__() -> list[str]:
    of_methods = importlib.import_module("tff_fedlabel.algorithms").__all__
    return sorted({*globals(), *__all__, *(n for n in of_methods if n[0] == "b" or "Config" in n)})


_check_environment()
__version__ = metadata.version("tff-fedlabel")
_tff_fedlabel_startup.install()
_compatibility.choose_keras_2()
