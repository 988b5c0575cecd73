"""Images and clients: where data comes from, how it is split, what a client hands to a method.

Submodules load on first use, so that names and flags can be checked without TensorFlow.
"""

import importlib

__all__ = [
    "data_source",
    "federated",
    "own_data",
    "partition",
    "partition_plot",
    "server_labels",
    "sources",
]


def __getattr__(name: str):
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
