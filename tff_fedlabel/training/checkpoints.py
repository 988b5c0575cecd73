"""The states of a run's last rounds, and of its best one, on disk."""

import os
import pathlib
from typing import Any

import tensorflow_federated as tff

from tff_fedlabel import _notebook


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read."""


class Checkpoints:
    """Checkpoints of a run, written by TFF's program state manager.

    Args:
      path: The run directory.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = pathlib.Path(path)
        self._last = self._manager("checkpoints", keep=2)
        self._best = self._manager("checkpoints/best", keep=1)

    def _manager(self, folder: str, keep: int) -> tff.program.FileProgramStateManager:
        return tff.program.FileProgramStateManager(
            str(self._path / folder), prefix="round_", keep_total=keep, keep_first=False
        )

    def save(self, content: Any, round_num: int) -> None:
        """Saves a structure of arrays under the number of completed rounds; keeps the last two."""
        _notebook.wait(self._last.save(content, version=round_num))

    def save_best(self, content: Any, round_num: int) -> None:
        """Saves it in `checkpoints/best`, replacing what is there."""
        versions = _notebook.wait(self._best.get_versions()) or []
        if round_num in versions:  # Computed again after a crash, bit for bit the same.
            return
        _notebook.wait(self._best.save(content, version=round_num))

    def load_latest(self, structure: Any) -> tuple[Any, int] | None:
        """The newest saved content and its round; None if there is none.

        Args:
          structure: A structure like the saved one; the values do not matter.

        Raises:
          CheckpointError: It is damaged.
        """
        try:
            saved, version = _notebook.wait(self._last.load_latest(structure))
        except Exception as error:
            version = max(_notebook.wait(self._last.get_versions()) or [0])
            raise CheckpointError(
                f"checkpoint {version} in {self._path} cannot be read ({type(error).__name__}); if "
                "it is damaged, delete it to resume from the previous one, or without one from the "
                "start."
            ) from error
        return None if saved is None else (saved, version)
