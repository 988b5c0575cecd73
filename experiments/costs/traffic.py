"""Bytes that a client receives and sends in a round, from the types of the process."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff


class Traffic(NamedTuple):
    """Bytes of a client in a round.

    Attributes:
      down: Weights, the method's state, and the memories of its helpers.
      up: The update, its weight, metrics, what else the method sends, and the client's memory where
        it goes to other clients as their helper's. (A memory that only the client itself reads
        stays with it.)
      model: The weights of the model, for comparison (R in the paper).
    """

    down: int
    up: int
    model: int

    @property
    def in_models(self) -> float:
        """All of it in sizes of the model."""
        return (self.down + self.up) / self.model


def measure(
    process: tff.learning.templates.LearningProcess,
    model: tff.learning.models.FunctionalModel,
    memory: Any = None,
    helpers: int = 0,
) -> Traffic:
    """The bytes of a method, without those of TFF's and gRPC's wrapping.

    Args:
      process: Its process.
      model: The model that the process trains.
      memory: The initial memory of a client, a structure of arrays, if the method has memory.
      helpers: The helpers of a client.
    """
    form = tff.backends.mapreduce.get_map_reduce_form_for_computation(process.next)
    down = num_bytes(form.prepare.type_signature.result)
    up = num_bytes(form.work.type_signature.result)
    if memory is not None:
        remembered = sum(np.asarray(array).nbytes for array in tf.nest.flatten(memory))
        down += helpers * remembered
        if not helpers:  # With the client's number, an int32.
            up -= remembered + np.dtype(np.int32).itemsize
    weights = sum(np.asarray(w).nbytes for w in model.initial_weights[0])
    return Traffic(down, up, weights)


def num_bytes(type_spec: tff.Type) -> int:
    """The bytes of a value of tensors of known shapes."""
    if isinstance(type_spec, tff.TensorType):
        return int(np.prod(type_spec.shape, dtype=np.int64)) * np.dtype(type_spec.dtype).itemsize
    if isinstance(type_spec, tff.StructType):
        return sum(num_bytes(part) for _, part in tff.structure.to_elements(type_spec))
    raise TypeError(f"no fixed size: {type_spec}")
