"""The Keras model of a run: as it is trained, and the same from Keras' own layers alone."""

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_fedlabel import models

# Options of layers that decide what they compute; the rest is how they are trained or called.
_OPTIONS = ("strides", "padding", "activation", "groups", "epsilon")


def build(
    model: str,
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    width: int | None = None,
    seed: int = 0,
    mixed_precision: str | None = None,
) -> tf.keras.Model:
    """Builds the model of a run; the arguments are those of `RunConfig`."""
    with keras_policy(mixed_precision):
        return models.build_keras(model, input_shape, num_classes, width=width, seed=seed)


def weights_of(model: tf.keras.Model) -> list[tf.Variable]:
    """The weights in the order in which `models.functional_model`, and so a run, has them."""
    return [*model.trainable_weights, *model.non_trainable_weights]


def assign(model: tf.keras.Model, weights: Sequence[np.ndarray]) -> None:
    """Puts weights, in the order of `weights_of`, into a model."""
    for variable, value in zip(weights_of(model), weights, strict=True):
        variable.assign(value)


@contextlib.contextmanager
def keras_policy(dtype: str | None) -> Iterator[None]:
    """Keras layers made inside the block compute in `dtype`; None changes nothing."""
    if dtype is None:
        yield
        return
    before = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy(f"mixed_{dtype}")
    try:
        yield
    finally:
        tf.keras.mixed_precision.set_global_policy(before)


def with_standard_layers(model: tf.keras.Model) -> tf.keras.Model:
    """The same function of pixels 0 to 255, from layers that any Keras 2 knows.

    `models._group_norm.GroupNorm` computes what Keras' GroupNormalization does; it becomes one that
    computes in float32, as it does. Layers are called after their type and place (`conv2d_1`), so
    the names do not depend on what else was built in the process.

    Args:
      model: A model of `models.MODELS`, on images `[batch, h, w, c]` in [0, 1].

    Returns:
      A model on images `[batch, h, w, c]` in 0..255, of any dtype, with a copy of the weights.
    """
    images = tf.keras.Input(model.input_shape[1:], name="images")
    made = {"images": tf.keras.layers.Rescaling(1 / 255, name="pixels", dtype="float32")(images)}
    for name, layer, inputs in _in_order(model):
        if type(layer).__name__ == "GroupNorm":
            own = {"groups": layer.groups, "epsilon": layer.epsilon, "dtype": "float32"}
            standard = tf.keras.layers.GroupNormalization(**own, name=name)
        else:
            standard = type(layer).from_config({**layer.get_config(), "name": name})
        tensors = [made[one] for one in inputs]
        made[name] = standard(tensors if len(tensors) > 1 else tensors[0])
        standard.set_weights(layer.get_weights())
    return tf.keras.Model(images, made[name], name=model.name)


def architecture(model: tf.keras.Model) -> list[dict[str, Any]]:
    """The layers of a model in the order of computation, as JSON can hold them.

    Returns:
      For each layer `name`, `type`, `inputs` (names; "images" are the pixels in [0, 1]), the names
      of its `weights`, and those of strides, padding, activation, groups and epsilon that it has.
    """
    return [
        {
            "name": name,
            "type": type(layer).__name__,
            "inputs": inputs,
            "weights": [name for name, _ in _weights(name, layer)],
            **{key: value for key, value in layer.get_config().items() if key in _OPTIONS},
        }
        for name, layer, inputs in _in_order(model)
    ]


def named_weights(model: tf.keras.Model) -> dict[str, np.ndarray]:
    """The weights as float32 arrays by name, such as `conv2d_1/kernel`."""
    return {
        name: weight.numpy()
        for layer_name, layer, _ in _in_order(model)
        for name, weight in _weights(layer_name, layer)
    }


def _weights(layer_name: str, layer: tf.keras.layers.Layer):
    for weight in layer.weights:
        yield f"{layer_name}/{weight.name.split('/')[-1].removesuffix(':0')}", weight


def _in_order(
    model: tf.keras.Model,
) -> Iterator[tuple[str, tf.keras.layers.Layer, list[str]]]:
    """Yields (name, layer, names of the layers that it reads) in the order of computation."""
    (images,) = model.inputs
    name_of, numbers = {id(images): "images"}, collections.Counter()
    for layer in model.layers[1:]:
        kind = {"GlobalAveragePooling2D": "pooling", "GroupNorm": "group_norm"}.get(
            type(layer).__name__, type(layer).__name__.lower()
        )
        name = f"{kind}_{numbers[kind]}"
        numbers[kind] += 1
        inputs = layer.input if isinstance(layer.input, list) else [layer.input]
        yield name, layer, [name_of[id(tensor)] for tensor in inputs]
        name_of[id(layer.output)] = name
