"""Results as NumPy arrays, behind which the tensors stay at hand.

TFF's contexts return NumPy arrays, and a round's result is mostly the next round's argument. An
array that comes back as it is finds its tensor again: nothing is checked, converted or copied. On
a GPU the array is the host's copy and the tensor the one in the GPU's memory, so what is saved
there is the copy to the device as well.
"""

from __future__ import annotations

import weakref

import numpy as np
import tensorflow as tf

# Those whose memory NumPy can show; of the others, such as bfloat16 and strings, it has a copy.
_SHOWN = frozenset("biufc")

# id of an array -> the array, and its tensor. An entry ends with its array.
_kept: dict[int, tuple[weakref.ref, tf.Tensor]] = {}


def to_numpy(tensor: tf.Tensor):
    """A tensor's value: a NumPy scalar, or an array that cannot be written to.

    The array shows the tensor's memory where it can. Nobody may write there: the tensor would
    change too, and be used in the next call as if it had not.
    """
    if not tensor.shape.rank or np.dtype(tensor.dtype.as_numpy_dtype).kind not in _SHOWN:
        return tensor.numpy()
    array = np.asarray(memoryview(tensor))
    array.flags.writeable = False
    key = id(array)
    _kept[key] = (weakref.ref(array, lambda _: _kept.pop(key, None)), tensor)
    return array


def tensor_of(value) -> tf.Tensor | None:
    """The tensor behind an array of `to_numpy`; None of anything else, copies of it included."""
    known, tensor = _kept.get(id(value), (lambda: None, None))
    return tensor if tensor is not None and known() is value else None
