"""A Keras model's forward pass as a TensorFlow function that owns no variables.

The only file that knows how Keras layers hold their weights (attributes, or lists and dicts in
attributes) and their random generators (`_random_generator`, private). During one trace both are
replaced by tensors, so that the traced function depends on its arguments alone. It also does to
these tensors what Keras' mixed precision does to weights.
"""

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tff_fedlabel.models._loss_scaling import with_loss_scaling

# Keras' own lists of a layer's weights, which no forward pass reads.
_BOOKKEEPING = ("_trainable_weights", "_non_trainable_weights")
# Bytes of a float -> the integer that holds its bits (see `_without_gradient`).
_BITS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


class BatchNormError(ValueError):
    """A layer changes a weight while it computes, and a FunctionalModel cannot carry that."""


def modules_of(model: tf.keras.Model) -> tuple[tf.Module, ...]:
    """`model` and every layer and module in it, always in the same order."""
    for layer in model._flatten_layers():
        # Recurrent cells with dropout keep a dictionary of masks with one key for each graph. Two
        # such keys cannot be sorted, and then `submodules` fails.
        if hasattr(layer, "reset_dropout_mask"):
            layer.reset_dropout_mask()
            layer.reset_recurrent_dropout_mask()
    return model, *model.submodules


def stateless_forward(
    model: tf.keras.Model, image_spec: tf.TensorSpec, *, training: bool
) -> Callable[..., tf.Tensor]:
    """Traces `model` once and returns `forward(images, *weights) -> output`.

    Gradients are those of the trainable weights, and are dense, also where Keras gives
    `tf.IndexedSlices`; images and other weights have none. A layer whose policy is `mixed_float16`
    or `mixed_bfloat16` computes in that dtype, from weights and to gradients in float32. In a model
    with float16 layers the gradients are those of a scaled loss, and the output is float32.

    Args:
      model: A built model; `weights` are its `trainable_weights` and then its
        `non_trainable_weights`, each in Keras' order.
      image_spec: Shape and dtype of `images`.
      training: Whether dropout and its like are active. Their random numbers then depend on
        nothing but the images and the last trainable weight, so equal runs stay equal, and each
        step draws new ones since each step has other images or moves that weight.

    Raises:
      BatchNormError: If the forward pass changes a weight.
      ValueError: If the forward pass reads a tensor or a variable that is not a weight, or uses a
        weight as only a variable can be used.
    """
    trained = len(model.trainable_weights)
    weights = [*model.trainable_weights, *model.non_trainable_weights]
    takes_training = "training" in inspect.signature(model.call).parameters
    options = {"training": training} if takes_training else {}

    @tf.function(
        input_signature=[image_spec, *(tf.TensorSpec(w.shape, w.dtype) for w in weights)],
        autograph=False,
    )
    def forward(images, *tensors):
        images = _without_gradient(images)
        constant = [_without_gradient(tensor) for tensor in tensors[trained:]]

        def run(*tensors):
            key = images, tensors[-1]
            tensors = [_with_dense_gradient(tensor) for tensor in tensors]
            with _replaced_state(model, weights, [*tensors, *constant], key):
                return model(images, **options)

        run = with_loss_scaling(run) if _has_float16(model) else run
        return run(*tensors[:trained])

    try:
        concrete = forward.get_concrete_function()
    except AttributeError as error:
        reason = _why_tensors_do_not_do(str(error))
        if reason is None:
            raise
        raise reason from error
    _check_captures(concrete, weights)
    return concrete


def _why_tensors_do_not_do(error: str) -> ValueError | None:
    """What to raise when a layer, given a tensor for its weight, used an attribute it lacks."""
    found = re.search(r"Tensor' object has no attribute '(\w+)'", error)
    attribute = found.group(1) if found else ""
    if attribute != "handle" and not hasattr(tf.Variable, attribute):
        return None
    # Keras puts the layer's name and type before the message.
    found = re.search(r"when calling layer ['\"](.+?)['\"] \(type (\w+)\)", error)
    name, kind = found.groups() if found else ("", "")
    layer = f"Layer {name!r}" if name else "The Keras model"
    if kind.endswith("BatchNormalization"):
        return BatchNormError(
            f"{layer} is a batch normalisation whose statistics move in training, which a "
            "FunctionalModel cannot carry: use tf.keras.layers.GroupNormalization instead, or "
            "freeze its statistics with layer.trainable = False."
        )
    if attribute.startswith(("assign", "scatter")):
        return BatchNormError(
            f"{layer} changes a weight while it computes, and a FunctionalModel cannot carry such "
            "state: use layers that leave their weights as they are."
        )
    return ValueError(
        f"{layer} uses .{attribute} of a weight, but the weights of a FunctionalModel are tensors: "
        "use the weight itself, as in tf.convert_to_tensor(self.kernel)."
    )


def _check_captures(concrete: Any, weights: Sequence[tf.Variable]) -> None:
    if not concrete.captured_inputs:
        return
    captured = concrete.captured_inputs[0]
    names = [w.name for w in weights if w.handle is captured]
    what = f"weight {names[0]!r}" if names else f"a {captured.dtype.name} tensor or variable"
    raise ValueError(
        f"The Keras model reads {what} outside its layers' attributes or in a tf.function of "
        "its own: use add_weight for weights, NumPy for constants, and no inner tf.function."
    )


def _without_gradient(tensor: tf.Tensor) -> tf.Tensor:
    """The same values, towards which no gradient is taken.

    `tf.stop_gradient` is not enough: TensorFlow builds the gradient of a function towards all its
    floating point inputs, and fails at an operation on the way that has no gradient. Some of Keras'
    augmentation layers have such operations. TensorFlow builds no gradient through integers.
    """
    if not tensor.dtype.is_floating:
        return tensor
    return tf.bitcast(tf.bitcast(tensor, _BITS[tensor.dtype.size]), tensor.dtype)


def _with_dense_gradient(tensor: tf.Tensor) -> tf.Tensor:
    # The gradient of a lookup of rows is a tf.IndexedSlices, which little code can add, clip or
    # average. That of a reshape is always dense, and graph optimisation drops a reshape to the same
    # shape.
    return tf.reshape(tensor, tensor.shape)


def _has_float16(model: tf.keras.Model) -> bool:
    # bfloat16 has the exponents of float32: nothing vanishes in it.
    return any(getattr(m, "compute_dtype", None) == "float16" for m in modules_of(model))


@contextlib.contextmanager
def _replaced_state(
    model: tf.keras.Model,
    weights: Sequence[tf.Variable],
    tensors: Sequence[tf.Tensor],
    key_of: tuple[tf.Tensor, tf.Tensor],
) -> Iterator[None]:
    """Puts `tensors` where the layers have `weights`, and generators seeded from `key_of`."""
    tensor_of = {id(w): t for w, t in zip(weights, tensors, strict=True)}
    key = None
    saved = []
    try:
        for index, module in enumerate(modules_of(model)):
            for name, value in list(vars(module).items()):
                if name == "_random_generator":
                    key = _key(*key_of) if key is None else key
                    seed = tf.random.experimental.stateless_fold_in(key, index)
                    replacement = _StatelessGenerator(seed)
                elif name in _BOOKKEEPING:
                    continue
                else:
                    dtype = getattr(module, "compute_dtype", None)
                    replacement = _replace(value, tensor_of, dtype)
                if replacement is not value:
                    saved.append((module, name, value))
                    vars(module)[name] = replacement  # Past Keras' tracking in __setattr__.
            if isinstance(module, tf.keras.layers.Normalization):
                # The layer computes with copies of its weights, which this makes anew.
                module.finalize_state()
        yield
    finally:
        for module, name, value in saved:
            vars(module)[name] = value


def _replace(value: Any, tensor_of: dict[int, tf.Tensor], dtype: str | None) -> Any:
    """`value` itself, or its copy with tensors of the graph for variables and eager tensors in it.

    Args:
      value: An attribute of a layer, or what is in it.
      tensor_of: The tensor for each variable, by the variable's id.
      dtype: In which the layer computes. As in Keras, its weights are read in this dtype, except
        those that were made with `experimental_autocast=False`.
    """
    if isinstance(value, tf.Variable):
        tensor = tensor_of.get(id(value))
        if tensor is None:
            return value
        # Only Keras' AutoCastVariable, which has no public name, has a `true_dtype`.
        return tf.cast(tensor, dtype) if dtype and hasattr(value, "true_dtype") else tensor
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        # An eager tensor with many values would be captured and not written into the graph.
        return tf.constant(value.numpy())
    if isinstance(value, dict):
        replaced = {k: _replace(v, tensor_of, dtype) for k, v in value.items()}
        changed = any(replaced[k] is not value[k] for k in value)
    elif isinstance(value, list | tuple):
        replaced = [_replace(v, tensor_of, dtype) for v in value]
        changed = any(new is not old for new, old in zip(replaced, value, strict=True))
    else:
        return value
    return replaced if changed else value


def _key(images: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """A seed, int64 `[2]`, from the bits of the images and of one weight."""
    return tf.stack(
        [
            tf.reduce_sum(tf.cast(tf.bitcast(tf.cast(x, tf.float32), tf.int32), tf.int64))
            for x in (images, weight)
        ]
    )


class _StatelessGenerator:
    """Stands in for the generator of one Keras layer, drawing from `seed` without any state."""

    def __init__(self, seed: tf.Tensor):
        self._seed = seed
        self._draws = itertools.count()

    def make_seed_for_stateless_op(self) -> tf.Tensor:
        return tf.random.experimental.stateless_fold_in(self._seed, next(self._draws))

    def random_uniform(self, shape, minval=0.0, maxval=None, dtype=None, nonce=None):
        del nonce
        dtype = dtype or tf.keras.backend.floatx()
        seed = self.make_seed_for_stateless_op()
        return tf.random.stateless_uniform(shape, seed, minval, maxval, dtype)

    def random_normal(self, shape, mean=0.0, stddev=1.0, dtype=None, nonce=None):
        del nonce
        dtype = dtype or tf.keras.backend.floatx()
        seed = self.make_seed_for_stateless_op()
        return tf.random.stateless_normal(shape, seed, mean, stddev, dtype)

    def truncated_normal(self, shape, mean=0.0, stddev=1.0, dtype=None, nonce=None):
        del nonce
        dtype = dtype or tf.keras.backend.floatx()
        seed = self.make_seed_for_stateless_op()
        return tf.random.stateless_truncated_normal(shape, seed, mean, stddev, dtype)

    def dropout(self, inputs, rate, noise_shape=None):
        seed = self.make_seed_for_stateless_op()
        # At least in float32: bfloat16 draws only 128 different numbers, 2 of them below 1%.
        wide = inputs if inputs.dtype.size >= 4 else tf.cast(inputs, tf.float32)
        kept = tf.nn.experimental.stateless_dropout(wide, rate, seed, noise_shape=noise_shape)
        return tf.cast(kept, inputs.dtype)
