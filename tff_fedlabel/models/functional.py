"""Turns a Keras model into a `tff.learning.models.FunctionalModel` of an image classifier.

`tff.learning.models.functional_model_from_keras` does nearly this, but it fails outside a graph,
makes Keras models that were built before it unusable, builds the Keras model again in every trace
and drops regularisers silently. Here the model is traced once, with its weights as arguments.
"""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import _validation
from tff_fedlabel._autograph import as_written
from tff_fedlabel.models import _arguments
from tff_fedlabel.models._random_operations import warn_of_stateful_draws
from tff_fedlabel.models._stateless import BatchNormError, modules_of, stateless_forward

__all__ = ["BatchNormError", "functional_model"]

KerasModelOrBuilder = tf.keras.Model | Callable[[], tf.keras.Model]

_PIXEL_MAX = 255.0
_NOT_LOGITS = ("Softmax", "Sigmoid")
# Ops through which an activation still reaches the output unchanged.
_TRANSPARENT = ("Identity", "IdentityN", "Reshape", "Squeeze", "Cast")


def functional_model(
    keras_model: KerasModelOrBuilder,
    *,
    input_shape: tuple[int, int, int],
    input_dtype: tf.DType = tf.uint8,
    num_classes: int | None = None,
) -> tff.learning.models.FunctionalModel:
    """Wraps a Keras image classifier for `tff.learning` and for every algorithm of this package.

    * `input_spec` is `OrderedDict(x=[None, *input_shape] input_dtype, y=[None] int32)`.
    * `predict_on_batch(model_weights, x, training)` gives float32 logits `[batch, classes]`. A
      uint8 `x` is divided by 255; a float `x` goes to the network as it is, whatever the spec says.
      It works in a graph and eagerly, owns no variables, and lets gradients through to the
      trainable weights alone, always as dense tensors.
    * `loss(output, label, sample_weight=None)` is the mean cross-entropy over the batch (0 for an
      empty batch); with weights, the sum of `weight * cross-entropy` over the batch size.
    * The metrics are `accuracy`, `loss` (means per image, 0 without images) and `num_examples`.
    * `initial_weights` are the Keras model's: a tuple in the order of its `trainable_weights`, and
      one in the order of its `non_trainable_weights`, by the `trainable` flags at the time of this
      call. `variable.assign(value)`, pair by pair, puts weights back into the Keras model.

    Frozen layers (`layer.trainable = False`) and weights that a layer keeps but never changes, such
    as those of `Normalization`, are in `initial_weights[1]` and do not change. So a pretrained base
    can be frozen in whole or in part. A `BatchNormalization` that is frozen, or called with
    `training=False`, uses the statistics it has, as in Keras; one that moves its statistics is
    refused.

    Dropout and the other random Keras layers are active with `training=True`. What they draw
    depends on the images and the weights only, so the same run draws the same again. Layers that
    call `tf.random.*` cannot repeat their draws, and a warning names them.

    Keras' mixed precision policies work, of the process (`tf.keras.mixed_precision`) or of single
    layers, as they were when the layers were made. `mixed_bfloat16` and `mixed_float16` layers
    compute in 16 bits; `initial_weights` and gradients are float32. With float16 layers the
    gradients are those of a scaled loss, scaled back, so that small ones are not lost; each
    backward pass finds its own scale (`_loss_scaling.py`).

    Args:
      keras_model: A Keras model with one input and one output, or a function without arguments
        that builds it.
      input_shape: `(height, width, channels)` of one image, each 1 or more.
      input_dtype: `tf.uint8` (pixels 0 to 255) or `tf.float32` (pixels in [0, 1]): what the
        datasets hold.
      num_classes: If given, the number of logits the model must have, 2 or more.

    Raises:
      BatchNormError: If a layer changes a weight while it computes, as a BatchNormalization does
        that is not frozen. It is a `ValueError`.
      ValueError: If an argument is out of range (a `TypeError` too if it is of the wrong type), or
        the model does not map such images to logits `[batch, classes]`, has no trainable weight,
        ends in a softmax or sigmoid, has regularisers (a FunctionalModel has no place for them), or
        trains weights of 16 bits (the policies `float16` and `bfloat16`; use the mixed ones).
    """
    input_shape = _arguments.image_shape(input_shape)
    input_dtype = _image_dtype(input_dtype)
    if num_classes is not None:
        num_classes = _validation.check_int("num_classes", num_classes, 2, or_else=" or None")
    image_spec = tf.TensorSpec([None, *input_shape], tf.float32)
    with tf.device("CPU"):  # The initial weights must not depend on the machine's accelerator.
        model = _built_model(keras_model, image_spec)
    _check_model(model)
    forwards = {
        training: stateless_forward(model, image_spec, training=training)
        for training in (False, True)
    }
    _check_output(forwards[False], num_classes)
    warn_of_stateful_draws(model, list(forwards.values()), stacklevel=2)
    trainable, constant = (
        tuple(np.asarray(w.numpy()) for w in weights)  # Of a scalar, numpy() gives a number.
        for weights in (model.trainable_weights, model.non_trainable_weights)
    )

    @tf.function(autograph=False)
    def predict_on_batch(model_weights: Any, x: tf.Tensor, training: bool = True) -> tf.Tensor:
        weights = tf.nest.flatten(model_weights)
        return tf.cast(forwards[training](_float_pixels(x), *weights), tf.float32)

    return tff.learning.models.FunctionalModel(
        initial_weights=(trainable, constant),
        predict_on_batch_fn=predict_on_batch,
        loss_fn=_mean_cross_entropy,
        metrics_fns=(_initialize_metrics, _update_metrics, _finalize_metrics),
        input_spec=collections.OrderedDict(
            x=tf.TensorSpec([None, *input_shape], input_dtype),
            y=tf.TensorSpec([None], tf.int32),
        ),
    )


def _image_dtype(input_dtype: Any) -> tf.DType:
    try:
        dtype = tf.as_dtype(input_dtype)
    except TypeError:
        dtype = None
    if dtype not in (tf.uint8, tf.float32):
        got = repr(input_dtype) if dtype is None else dtype.name
        raise _validation.WrongTypeError(f"input_dtype must be uint8 or float32, got {got}.")
    return dtype


def _float_pixels(x: tf.Tensor) -> tf.Tensor:
    x = tf.convert_to_tensor(x)
    if x.dtype == tf.uint8:
        return tf.cast(x, tf.float32) / _PIXEL_MAX
    return tf.cast(x, tf.float32)


def _built_model(keras_model: KerasModelOrBuilder, image_spec: tf.TensorSpec) -> tf.keras.Model:
    """The Keras model, called once on a black image if it has no weights yet."""
    model = keras_model
    if not isinstance(model, tf.keras.Model):
        if not callable(keras_model):
            raise _validation.WrongTypeError(
                "keras_model must be a tf.keras.Model or a function that builds one, got "
                f"{type(keras_model).__name__}."
            )
        model = keras_model()
        if not isinstance(model, tf.keras.Model):
            raise _validation.WrongTypeError(
                "The function given as keras_model must return a tf.keras.Model, it returned "
                f"{type(model).__name__}."
            )
    _check_input(model, image_spec)
    if not model.built:
        try:
            model(tf.zeros([1, *image_spec.shape[1:]]))
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            raise ValueError(
                f"The Keras model fails on images of shape {tuple(image_spec.shape[1:])}: "
                f"{_reason(error)}"
            ) from error
    return model


def _reason(error: Exception) -> str:
    """The line of a Keras error that says what is wrong: the first only names the layer."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("Exception enc")), repr(error))


def _check_input(model: tf.keras.Model, image_spec: tf.TensorSpec) -> None:
    if not model.inputs:  # Subclassed models and unbuilt stacks of layers declare none.
        return
    if len(model.inputs) != 1:
        raise ValueError(f"The Keras model must have one input, it has {len(model.inputs)}.")
    (declared,) = model.inputs
    if not declared.shape.is_compatible_with(image_spec.shape):
        raise ValueError(
            f"The Keras model takes inputs of shape {declared.shape}, not images of shape "
            f"{tuple(image_spec.shape[1:])} in batches of any size."
        )
    if not declared.dtype.is_floating:
        raise ValueError(
            f"The Keras model takes {declared.dtype.name} inputs, but it is given float32 pixels "
            "in [0, 1]: remove the input's dtype and any rescaling."
        )


def _check_model(model: tf.keras.Model) -> None:
    for layer in modules_of(model):
        if isinstance(layer, tf.keras.layers.Rescaling) and _divides_pixels(layer):
            raise ValueError(
                f"Layer {layer.name!r} scales pixels by {layer.scale:.3g}, but they reach the "
                "model in [0, 1] already: remove it."
            )
    if not model.trainable_weights:
        raise ValueError(
            "The Keras model has no trainable weights: one layer at least must not be frozen."
        )
    for weight in model.trainable_weights:
        if weight.dtype in (tf.float16, tf.bfloat16):
            raise ValueError(
                f"Weight {weight.name!r} is {weight.dtype.name}, in which small updates are lost: "
                f"use the policy 'mixed_{weight.dtype.name}', which computes in "
                f"{weight.dtype.name} and keeps weights in float32."
            )
    if model.losses:
        raise ValueError(
            "The Keras model has regularisers or other added losses, which a FunctionalModel "
            "would silently ignore: remove them (the client optimizer may decay the weights)."
        )


def _divides_pixels(layer: tf.keras.layers.Rescaling) -> bool:
    return isinstance(layer.scale, int | float) and abs(layer.scale) <= 2 / _PIXEL_MAX


def _check_output(forward: Any, num_classes: int | None) -> None:
    outputs = forward.outputs
    if len(outputs) != 1:
        raise ValueError(
            f"The Keras model must have one output, the logits; it has {len(outputs)}."
        )
    shape = outputs[0].shape
    if shape.rank != 2 or shape[1] is None or shape[1] < 2:
        raise ValueError(f"The Keras model must output logits [batch, classes], not {shape}.")
    if num_classes is not None and shape[1] != num_classes:
        raise ValueError(
            f"The Keras model outputs {shape[1]} logits, but num_classes is {num_classes}."
        )
    op = forward.outputs[0].op
    while op.type in _TRANSPARENT:
        op = op.inputs[0].op
    if op.type in _NOT_LOGITS:
        raise ValueError(
            f"The Keras model ends in a {op.type.lower()}, but logits are needed: remove the "
            "activation of its last layer."
        )


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.cast(labels, tf.int32), logits=logits
    )


@as_written
def _mean_cross_entropy(output, label, sample_weight=None) -> tf.Tensor:
    losses = _cross_entropy(output, label)
    if sample_weight is not None:
        losses *= tf.cast(sample_weight, losses.dtype)
    # Not reduce_mean: an empty batch must give 0, not NaN.
    return tf.reduce_sum(losses) / tf.cast(tf.maximum(tf.size(losses), 1), losses.dtype)


@tf.function(autograph=False)
def _initialize_metrics():
    return collections.OrderedDict(
        num_examples=tf.zeros([], tf.int64),
        correct=tf.zeros([], tf.int64),
        loss_sum=tf.zeros([], tf.float32),
    )


@tf.function(autograph=False)
def _update_metrics(state, labels, batch_output, sample_weight=None):
    del sample_weight  # The interface has it; nothing in tff.learning passes it.
    logits = batch_output.predictions
    labels = tf.cast(labels, tf.int64)
    hits = tf.equal(tf.argmax(logits, axis=-1, output_type=tf.int64), labels)
    return collections.OrderedDict(
        num_examples=state["num_examples"] + tf.size(labels, out_type=tf.int64),
        correct=state["correct"] + tf.math.count_nonzero(hits),
        loss_sum=state["loss_sum"] + tf.reduce_sum(_cross_entropy(logits, labels)),
    )


@tf.function(autograph=False)
def _finalize_metrics(state):
    num_examples = tf.cast(state["num_examples"], tf.float32)
    return collections.OrderedDict(
        accuracy=tf.math.divide_no_nan(tf.cast(state["correct"], tf.float32), num_examples),
        loss=tf.math.divide_no_nan(state["loss_sum"], num_examples),
        num_examples=state["num_examples"],
    )
