"""Returns results as NumPy arrays and keeps the tensors behind them for reuse.

TFF's contexts return NumPy arrays, and a round's result is mostly the next round's argument. For an
array that comes back unchanged its tensor is used again: nothing is checked, converted or copied.
On a GPU the array is the host's copy and the tensor is the one in the GPU's memory, so this also
saves the copy to the device.
"""

from __future__ import annotations

import weakref

import numpy as np
import tensorflow as tf

# Kinds of dtypes whose memory NumPy can view; others, such as bfloat16 and strings, it copies.
_VIEWABLE = frozenset("biufc")

# id of an array -> the array, and its tensor. An entry is removed with its array.
_kept: dict[int, tuple[weakref.ref, tf.Tensor]] = {}


def to_numpy(tensor: tf.Tensor):
    """A tensor's value: a NumPy scalar, or a read-only array.

    The array is a view of the tensor's memory where possible. Nobody may write to it: the tensor
    would change too, and the next call would use it as if it had not.
    """
    if not tensor.shape.rank or np.dtype(tensor.dtype.as_numpy_dtype).kind not in _VIEWABLE:
        return tensor.numpy()
    array = np.asarray(memoryview(tensor))
    array.flags.writeable = False
    key = id(array)
    _kept[key] = (weakref.ref(array, lambda _: _kept.pop(key, None)), tensor)
    return array


def tensor_of(value) -> tf.Tensor | None:
    """The tensor behind an array of `to_numpy`; None for anything else, including its copies."""
    known, tensor = _kept.get(id(value), (lambda: None, None))
    return tensor if tensor is not None and known() is value else None
