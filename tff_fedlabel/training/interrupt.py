"""SIGINT and SIGTERM during a run."""

import contextlib
import os
import signal
from collections.abc import Iterator

from tff_fedlabel import _notebook


class Interrupted(Exception):
    """The run was asked to stop; every completed round is on disk.

    Attributes:
      signal_number: The signal that stopped it.
    """

    def __init__(self, when: str, output_dir: os.PathLike, signal_number: int):
        how = f"--resume --output_dir {output_dir} continues the run (in Python: resume=True)."
        if _notebook.is_running():
            how = f"the same call with resume=True continues the run in {output_dir}."
        super().__init__(f"stopped {when}; {how}")
        self.signal_number = signal_number


class Interrupt:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt, but only where work can be discarded.

    Everywhere else (while files are written) the signal waits for the next such place.
    """

    def __init__(self):
        self.signal_number = signal.SIGINT
        self._pending = False
        self._allowed = False
        self._previous = {}

    def __enter__(self):
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        except ValueError:  # Not the main thread: whoever owns it handles signals.
            pass
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, signal_number, _):
        self._pending, self.signal_number = True, signal_number
        if self._allowed:
            # Here, since the exception may arrive when `allowed` is already exiting.
            self._allowed = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside the block a signal raises KeyboardInterrupt; one that came before does so at once.

        It may be raised after the work inside is done, so check for that.
        """
        self._allowed = True
        try:
            if self._pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._allowed = False
