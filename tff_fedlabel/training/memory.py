"""A method's memory of clients between rounds, kept here rather than at the server or in TFF."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class ClientMemory(Mapping):
    """The memories of the clients that have taken part: client number -> structure of arrays.

    Args:
      initial: The memory of a client that has not taken part yet, a structure of NumPy arrays.
      helpers: `Method.choose_helpers`, or None.
    """

    def __init__(self, initial: Any, helpers=None):
        self._initial = initial
        self._choose_helpers = helpers
        self._values: dict[int, list[np.ndarray]] = {}

    def __getitem__(self, client: int) -> Any:
        return tf.nest.pack_sequence_as(self._initial, self._values[client])

    def __iter__(self):
        return iter(sorted(self._values))

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        """Bytes of all memories."""
        return sum(array.nbytes for value in self._values.values() for array in value)

    def attach(self, data: collections.OrderedDict, client: int, round_num: int) -> Any:
        """Adds the memories of a client and of its helpers to the client's data.

        Args:
          data: What `FederatedData.client_dataset` gives.
          client: The client's number.
          round_num: The round that the data is for.

        Returns:
          `data` with `memory=`, a dataset of one element `OrderedDict(client=int32, value=)`, and,
          if the method has helpers, `helpers=`, a dataset of the helpers' values.
        """
        own = self[client] if client in self._values else self._initial
        element = collections.OrderedDict(client=np.int32(client), value=own)
        data = collections.OrderedDict(data, memory=tf.data.Dataset.from_tensors(element))
        if self._choose_helpers is not None:
            helpers = [self[h] for h in self._choose_helpers(self, client, round_num)]
            data["helpers"] = self._dataset(helpers)
        return data

    def _dataset(self, values: Sequence[Any]) -> tf.data.Dataset:
        def stacked(*rows):
            return np.stack(rows)

        if values:
            return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(stacked, *values))
        empty = tf.nest.map_structure(lambda a: a[np.newaxis][:0], self._initial)
        return tf.data.Dataset.from_tensor_slices(empty)

    def update(self, stacked: Mapping[str, Any]) -> None:
        """Stores the memories that a round returned: `OrderedDict(client=[n], value=)`, stacked."""
        columns = [np.asarray(column) for column in tf.nest.flatten(stacked["value"])]
        for row, client in enumerate(np.asarray(stacked["client"])):
            # A copy: a view would keep the whole cohort's array alive.
            self._values[int(client)] = [np.array(column[row]) for column in columns]

    def state(self) -> collections.OrderedDict:
        """All memories as one structure of arrays, for a checkpoint."""
        clients = list(self)
        empty = [array[np.newaxis][:0] for array in tf.nest.flatten(self._initial)]
        columns = [
            np.stack([self._values[client][i] for client in clients]) if clients else empty[i]
            for i in range(len(empty))
        ]
        return collections.OrderedDict(
            client=np.asarray(clients, np.int32),
            value=tf.nest.pack_sequence_as(self._initial, columns),
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self._values = {}
        self.update(state)
