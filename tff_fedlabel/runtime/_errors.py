"""The errors by which a runtime says that it failed."""


class WorkerError(RuntimeError):
    """TFF's worker did not start, or is gone. The message is one line and names the cause."""


class DeviceError(RuntimeError):
    """The GPU that was required is not there, or the clients' operations do not run on it."""


class UnsupportedComputationError(ValueError):
    """The runtime cannot run the computation; the message says what in it, and what can."""


class ComputationError(RuntimeError):
    """The runtime is well, but the computation it ran failed.

    The message's first line says why; TensorFlow adds lines that say where.
    """
