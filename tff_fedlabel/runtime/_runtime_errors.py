"""The errors by which a runtime says that it failed."""

import re


class WorkerError(RuntimeError):
    """TFF's worker did not start, or is gone. The message is one line and names the cause."""


class DeviceError(RuntimeError):
    """The GPU that was required is not there, or the clients' operations do not run on it."""


class UnsupportedComputationError(ValueError):
    """The runtime cannot run the computation; the message says what in it, and what can."""


class ComputationError(RuntimeError):
    """The runtime is well, but the computation it ran failed.

    The message's first line says why. A Python function in the client's dataset adds its traceback.
    """


def readable(message: str) -> str:
    """A message of TensorFlow without the names that it gave to the nodes of graphs."""
    reason = re.split(r"\s*\[\[\{\{|\s*\[Op:", message)[0]
    return re.sub(r"\{\{(function_)?node [^{}]*\}\}\s*", "", reason).strip() or message
