"""Keras image classifiers, and their conversion to `tff.learning.models.FunctionalModel`."""

import functools

import tensorflow as tf
import tensorflow_federated  # noqa: F401 (makes tf.keras Keras 2, so before tf.keras is used)

from tff_fedlabel import _validation
from tff_fedlabel.models.cnn import build_cnn
from tff_fedlabel.models.functional import BatchNormError, functional_model
from tff_fedlabel.models.resnet import build_resnet

# Name -> builder(input_shape, num_classes, width=..., seed=0).
MODELS = {
    "cnn": build_cnn,
    "resnet18": functools.partial(build_resnet, 18),
    "resnet34": functools.partial(build_resnet, 34),
    "resnet50": functools.partial(build_resnet, 50),
}


def build_keras(
    name: str,
    input_shape: tuple[int, int, int],
    num_classes: int,
    width: int | None = None,
    seed: int = 0,
) -> tf.keras.Model:
    """Builds the model called `name` in `MODELS`; a `width` of None is that model's own default.

    Raises:
      ValueError: If no model has this name or an argument is out of range; a `TypeError` too if an
        argument is of the wrong type.
    """
    name = _validation.check_name("model", name, MODELS)
    options = {} if width is None else {"width": width}
    return MODELS[name](input_shape, num_classes, seed=seed, **options)


__all__ = [
    "MODELS",
    "BatchNormError",
    "build_cnn",
    "build_keras",
    "build_resnet",
    "functional_model",
]
