"""FedLabel and its baselines as `tff.learning` processes.

Submodules load on first use: importing this package costs nothing and says nothing.
"""

import atexit
import importlib
import importlib.util
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


def _of_methods() -> list[str]:
    """`build_<name>` and the class of its parameters, of every method."""
    algorithms = importlib.import_module("tff_fedlabel.algorithms")
    names = ((f"build_{m.name}", m.config_class.__name__) for m in algorithms.METHODS.values())
    return sorted({name for pair in names for name in pair})


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(f"tff_fedlabel.{name}")
    if name == "__all__":
        return [*_of_methods(), *_SUBMODULES]
    # `from tff_fedlabel import command_line` asks here first; the methods are not needed for it.
    is_module = importlib.util.find_spec(f"{__name__}.{name}") is not None
    if not is_module and name in _of_methods():
        return getattr(importlib.import_module("tff_fedlabel.algorithms"), name)
    raise AttributeError(f"module 'tff_fedlabel' has no attribute {name!r}")


@atexit.register
def _end_tffs_own_context() -> None:
    if "tensorflow_federated" in sys.modules:
        importlib.import_module("tff_fedlabel.runtime.local").drop_default_context()


def __dir__() -> list[str]:
    return sorted({*globals(), *_of_methods(), *_SUBMODULES})


_check_environment()
__version__ = metadata.version("tff-fedlabel")
_tff_fedlabel_startup.install()
_compatibility.choose_keras_2()
