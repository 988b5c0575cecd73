"""Packages that TFF imports and seldom uses, executed when something in them is first used.

They take longer to import than TFF itself: TensorFlow Model Optimization brings Keras 3 and
matplotlib for the sake of one subpackage that needs neither, TensorFlow Probability serves one
sampler of differential privacy, and `dp_accounting.pld` brings SciPy's signal processing. Every
process pays for that: each run of a grid, each worker, each notebook.
"""

import sys
import threading
import types
from importlib.machinery import PathFinder

_PACKAGES = ("tensorflow_model_optimization", "tensorflow_probability", "dp_accounting.pld")


def postpone() -> None:
    """Puts packages that are not imported yet into `sys.modules` without executing them.

    Modules inside them can be imported, and then execute as always.
    """
    for name in _PACKAGES:
        spec = None if name in sys.modules else _find(name)
        if spec is not None and spec.submodule_search_locations is not None:
            sys.modules[name] = _Postponed(spec)


def _find(name):
    """The spec of a module; unlike `importlib.util.find_spec`, it imports no parent."""
    spec, path, parts = None, None, name.split(".")
    for number in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: number + 1]), path)
        if spec is None:
            break
        path = spec.submodule_search_locations
    return spec


class _Postponed(types.ModuleType):
    """A package that executes when it is asked for an attribute that it does not have.

    `importlib.util.LazyLoader` does so at any attribute, `__path__` and `__spec__` among them,
    which each import of a module inside asks for.
    """

    def __init__(self, spec):
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__file__ = spec.origin
        self.__loader__ = spec.loader
        self.__package__ = spec.name
        self.__path__ = spec.submodule_search_locations
        self._execution = threading.RLock()
        self._is_postponed = True

    def __getattr__(self, name):
        self._execute()
        return super().__getattribute__(name)

    def __dir__(self):
        self._execute()
        return super().__dir__()

    def _execute(self):
        with self._execution:  # Another thread must not see half of it.
            if not self._is_postponed:
                return
            self._is_postponed = False
            try:
                self.__spec__.loader.exec_module(self)
            except BaseException:
                self._is_postponed = True
                raise
