"""The errors that a runtime raises."""

import re


class WorkerError(RuntimeError):
    """TFF's worker did not start, or is gone. The message is one line and names the cause."""


class DeviceError(RuntimeError):
    """The required GPU is missing, or the clients' operations do not run on it."""


class UnsupportedComputationError(ValueError):
    """The runtime cannot run the computation; the message says which part, and what can."""


class ComputationError(RuntimeError):
    """The runtime works, but the computation that it ran failed.

    The message's first line says why. A Python function in the client's dataset adds its traceback.
    """


def readable(message: str) -> str:
    """An error message of TensorFlow without the names of graph nodes."""
    reason = re.split(r"\s*\[\[\{\{|\s*\[Op:", message)[0]
    return re.sub(r"\{\{(function_)?node [^{}]*\}\}\s*", "", reason).strip() or message
