"""TensorFlow and TFF as modules that are imported when something in them is first used.

A method's file holds both what its flags are made from and what it computes. The command line reads
the former, and a typing error or `--help` should not wait for the seconds that TensorFlow takes.
"""

import importlib
import types


class _LazyModule(types.ModuleType):
    def __getattr__(self, name: str):
        return getattr(importlib.import_module(self.__name__), name)

    def __dir__(self):
        return dir(importlib.import_module(self.__name__))


tf = _LazyModule("tensorflow")
tff = _LazyModule("tensorflow_federated")
