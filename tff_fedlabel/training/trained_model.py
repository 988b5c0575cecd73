"""The model that a run has trained, read back from its directory."""

import dataclasses
import functools
import os
import pathlib
import re
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import models
from tff_fedlabel.datasets import sources
from tff_fedlabel.training import keras_model
from tff_fedlabel.training.checkpoints import CheckpointError
from tff_fedlabel.training.stored_run import RunDirectoryError, StoredRun


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model with the weights of a run.

    Attributes:
      run: The run.
      round_num: The round after which the model had these weights.
      class_names: Names of the classes, in the order of the logits.
      keras: The Keras model, on images in [0, 1], with the weights.
      image_shape: (height, width, channels).
      is_own: Whether the model is none of `models.MODELS`.
    """

    run: StoredRun
    round_num: int
    class_names: tuple[str, ...]
    keras: tf.keras.Model
    image_shape: tuple[int, int, int]
    is_own: bool = False

    @functools.cached_property
    def functional(self) -> tff.learning.models.FunctionalModel:
        """The functional model as the run had it; its `initial_weights` are the trained ones."""
        return models.functional_model(self.keras, input_shape=self.image_shape)

    @property
    def weights(self) -> tff.learning.models.ModelWeights:
        """The trained weights."""
        return tff.learning.models.ModelWeights(*self.functional.initial_weights)


def load_model(
    run_dir: str | os.PathLike,
    *,
    best: bool = False,
    data_dir: str | None = None,
    model: tf.keras.Model | None = None,
) -> TrainedModel:
    """Reads the model of a run, finished or not, from its newest checkpoint.

    Args:
      run_dir: The run directory.
      best: Whether to take the round with the best validation accuracy instead.
      model: For a run of `make_experiment` with a Keras model of one's own: that model, made
        again. It is given the trained weights.
      data_dir: Where the data set lies. It is only read for runs whose config.json does not say
        what the images are: those of older versions.

    Raises:
      RunDirectoryError: There is no run, or it has no checkpoint.
      CheckpointError: The checkpoint is damaged or of another model.
      datasets.sources.DataNotFoundError: The data set was needed and is not there.
    """
    run = StoredRun(run_dir)
    leaves, round_num = read_checkpoint(run_dir, best=best)
    choices = run.choices
    images = run.images()
    needed = ("model", "seed") if images is not None else ("model", "seed", "source", "split")
    missing = [name for name in needed if name not in choices]
    if missing:
        raise RunDirectoryError(f"{run_dir}/config.json does not say which {missing[0]}.")
    if images is None:
        source = sources.load(
            choices["source"],
            data_dir,
            choices["split"],
            choices["seed"],
            image_size=choices.get("image_size"),
        )
        images = tuple(source.train.x.shape[1:]), source.label_names
    shape, class_names = images
    if model is None and choices["model"] not in models.MODELS:
        raise RunDirectoryError(
            f"the run in {run_dir} has a model of its own ({choices['model']}); in Python, "
            "training.load_model(..., model=that Keras model, made again) reads its weights."
        )
    own = model is not None
    if model is None:
        model = keras_model.build(
            choices["model"],
            shape,
            len(class_names),
            width=choices.get("width"),
            seed=choices["seed"],
            mixed_precision=choices.get("mixed_precision"),
        )
    variables = keras_model.weights_of(model)
    if [tuple(v.shape) for v in variables] != shapes(leaves[: len(variables)]):
        raise CheckpointError(
            f"the checkpoint of round {round_num} in {run_dir} does not hold the weights of the "
            f"model {choices['model']} that its config.json names."
        )
    keras_model.assign(model, leaves[: len(variables)])
    return TrainedModel(run, round_num, class_names, model, shape, own)


def shapes(arrays: Any) -> list[tuple[int, ...]]:
    """The shapes of arrays."""
    return [tuple(np.shape(array)) for array in arrays]


def read_checkpoint(
    run_dir: str | os.PathLike, *, best: bool = False
) -> tuple[list[np.ndarray], int]:
    """All arrays of a run's newest checkpoint, or of its best round, and the round.

    TFF's program state manager writes a checkpoint as a SavedModel of one function, which returns
    the arrays of the state in order. A learning process has the model's weights first: the
    trainable ones and then the others. So no process, and no data set, is needed to read them.

    Raises:
      RunDirectoryError: There is no run, or it has no checkpoint.
      CheckpointError: The checkpoint is damaged.
    """
    StoredRun(run_dir)
    folder = pathlib.Path(run_dir) / "checkpoints"
    folder = folder / "best" if best else folder
    found = [re.fullmatch(r"round_(\d+)", path.name) for path in folder.glob("round_*")]
    rounds = [int(match[1]) for match in found if match]
    if not rounds:
        what = "no checkpoint of its best round" if best else "no checkpoint"
        raise RunDirectoryError(
            f"the run in {run_dir} has {what}: it was not trained far enough, or is of an older "
            "version."
        )
    path = folder / f"round_{max(rounds)}"
    try:
        arrays = tf.nest.flatten(tf.saved_model.load(str(path))())
    except Exception as error:  # TensorFlow raises what it likes.
        raise CheckpointError(
            f"checkpoint {path} cannot be read ({type(error).__name__}); if it is damaged, delete "
            "it to use the previous one."
        ) from error
    return [np.asarray(array) for array in arrays], max(rounds)
