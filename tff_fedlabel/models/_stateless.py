"""A Keras model's forward pass as a TensorFlow function that owns no variables.

The only file that knows how Keras layers hold their weights (attributes, or lists and dicts in
attributes) and their random generators (`_random_generator`, private): for the time of one trace
both are replaced by tensors, so that the traced function depends on its arguments alone. It also
does to these tensors what Keras' mixed precision does to weights.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tff_fedlabel.models._loss_scaling import with_loss_scaling

# Keras' own books about a layer's weights: not read by any forward pass.
_BOOKKEEPING = ("_trainable_weights", "_non_trainable_weights")


def stateless_forward(
    model: tf.keras.Model, image_spec: tf.TensorSpec, *, training: bool
) -> Callable[..., tf.Tensor]:
    """Traces `model` once and returns `forward(images, *weights) -> output`.

    A layer whose policy is `mixed_float16` or `mixed_bfloat16` computes in that dtype, from weights
    and to gradients in float32. In a model with float16 layers the gradients are those of a scaled
    loss, and the output is float32.

    Args:
      model: A built model; `weights` are in the order of its `trainable_weights`.
      image_spec: Shape and dtype of `images`.
      training: Whether dropout and its like are active. Their random numbers then depend on
        nothing but the images and the last weight, so equal runs stay equal, and each step draws
        new ones since each step has other images or moves that weight.

    Raises:
      ValueError: If the forward pass reads a tensor or a variable that is not a weight.
    """
    weights = model.trainable_weights
    takes_training = "training" in inspect.signature(model.call).parameters
    options = {"training": training} if takes_training else {}

    @tf.function(
        input_signature=[image_spec, *(tf.TensorSpec(w.shape, w.dtype) for w in weights)],
        autograph=False,
    )
    def forward(images, *tensors):
        def run(images, *tensors):
            with _replaced_state(model, weights, tensors, images):
                return model(images, **options)

        return (with_loss_scaling(run) if _has_float16(model) else run)(images, *tensors)

    concrete = forward.get_concrete_function()
    if concrete.captured_inputs:
        captured = concrete.captured_inputs[0]
        names = [w.name for w in weights if w.handle is captured]
        what = f"weight {names[0]!r}" if names else f"a {captured.dtype.name} tensor or variable"
        raise ValueError(
            f"The Keras model reads {what} outside its layers' attributes or in a tf.function of "
            "its own: use add_weight for weights, NumPy for constants, and no inner tf.function."
        )
    return concrete


def _has_float16(model: tf.keras.Model) -> bool:
    # bfloat16 has the exponents of float32: nothing vanishes in it.
    modules = (model, *model.submodules)
    return any(getattr(m, "compute_dtype", None) == "float16" for m in modules)


@contextlib.contextmanager
def _replaced_state(model, weights, tensors, images) -> Iterator[None]:
    tensor_of = {id(w): t for w, t in zip(weights, tensors, strict=True)}
    key = None
    saved = []
    try:
        for index, module in enumerate((model, *model.submodules)):
            for name, value in list(vars(module).items()):
                if name == "_random_generator":
                    key = _key(images, tensors[-1]) if key is None else key
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
        yield
    finally:
        for module, name, value in saved:
            vars(module)[name] = value


def _replace(value: Any, tensor_of: dict[int, tf.Tensor], dtype: str | None) -> Any:
    """`value` itself, or its copy with tensors in place of the variables in it.

    Args:
      value: An attribute of a layer, or what is in it.
      tensor_of: The tensor for each variable, by the variable's id.
      dtype: In which the layer computes. Its weights are read in it, but for those that were made
        with `experimental_autocast=False`, as Keras does.
    """
    if isinstance(value, tf.Variable):
        tensor = tensor_of.get(id(value))
        if tensor is None:
            return value
        # Only Keras' AutoCastVariable, which has no public name, has a `true_dtype`.
        return tf.cast(tensor, dtype) if dtype and hasattr(value, "true_dtype") else tensor
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
        # At least in float32: of the 128 numbers that bfloat16 draws, 2 are below a rate of 1%.
        wide = inputs if inputs.dtype.size >= 4 else tf.cast(inputs, tf.float32)
        kept = tf.nn.experimental.stateless_dropout(wide, rate, seed, noise_shape=noise_shape)
        return tf.cast(kept, inputs.dtype)
