"""The model that a run ended with as the start of another (`RunConfig.init_from`)."""

import os
from typing import Any

import numpy as np

from tff_fedlabel.training import keras_model, trained_model
from tff_fedlabel.training.stored_run import StoredRun


class StartingPoint:
    """The weights of a run, before it is known whether they fit; made by `read`."""

    def __init__(self, run: StoredRun, arrays: list[np.ndarray], round_num: int):
        self._run, self._arrays, self._round_num = run, arrays, round_num

    def __str__(self) -> str:
        return f"weights of the run in {self._run.path} after round {self._round_num}"

    def weights_for(self, config: Any, source: Any) -> list[np.ndarray]:
        """The weights for the model of another run.

        Args:
          config: Its `RunConfig`.
          source: Its `datasets.sources.Source`.

        Returns:
          Arrays in the order of the functional model's initial weights.

        Raises:
          ValueError: That is another model, or its images have another shape or other classes. The
            message says what differs.
        """
        there = self._run.choices
        shape = tuple(map(int, source.train.x.shape[1:]))
        classes = tuple(map(str, source.label_names))
        images, names = self._run.images() or (shape, classes)  # Older runs do not say.
        differing = []
        if there["model"] != config.model:
            differing.append(f"model is {there['model']} there and {config.model} here")
        if images != shape:
            differing.append(f"images are {_size(images)} there and {_size(shape)} here")
        if len(names) != len(classes):
            differing.append(f"there are {len(names)} classes there and {len(classes)} here")
        elif names != classes:
            index = next(i for i, name in enumerate(names) if name != classes[i])
            differing.append(f"class {index} is {names[index]!r} there and {classes[index]!r} here")
        if not differing:
            ours = keras_model.build(config.model, shape, len(classes), width=config.width)
            number = len(ours.weights)
            wanted = trained_model.shapes(keras_model.weights_of(ours))
            if trained_model.shapes(self._arrays[:number]) == wanted:
                return self._arrays[:number]
            differing.append(f"width is {there.get('width')} there and {config.width} here")
        raise ValueError(f"init_from {self._run.path} holds another model: {'; '.join(differing)}.")


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def read(run_dir: str | os.PathLike) -> StartingPoint:
    """Reads the newest checkpoint of a run.

    Raises:
      RunDirectoryError: There is no run, or it has no checkpoint.
      CheckpointError: The checkpoint is damaged.
    """
    arrays, round_num = trained_model.read_checkpoint(run_dir)
    return StartingPoint(StoredRun(run_dir), arrays, round_num)
