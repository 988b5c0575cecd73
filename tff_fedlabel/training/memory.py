"""A method's memory of clients between rounds, kept here rather than at the server or in TFF."""

import collections
import numbers
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_fedlabel import algorithms


class ClientMemory(Mapping):
    """The memories of the clients that have taken part: client number -> structure of arrays.

    Args:
      initial: The memory of a client that has not taken part yet, a structure of NumPy arrays.
      helpers: `Method.choose_helpers`, or None.
      method_name: The method's name, for messages.
    """

    def __init__(self, initial: Any, helpers=None, method_name: str = "the method"):
        self._initial = initial
        self._choose_helpers = helpers
        self._method_name = method_name
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

    def helpers(self, client: int, round_num: int) -> list[int]:
        """The numbers of the clients whose memories a client receives.

        Raises:
          algorithms.MethodError: `choose_helpers` returned something else.
        """
        if self._choose_helpers is None:
            return []
        # Read-only, like the arrays in it.
        chosen = self._choose_helpers(types.MappingProxyType(self), client, round_num)
        wanted = (
            f"choose_helpers of {self._method_name} must return numbers of clients that have taken "
            f"part, for client {client} in round {round_num} (from 0)"
        )
        if isinstance(chosen, str | bytes) or not isinstance(chosen, Iterable):
            raise algorithms.MethodError(f"{wanted}, got {chosen!r}.")
        chosen = list(chosen)
        for number in chosen:
            whole = isinstance(number, numbers.Integral) and not isinstance(number, bool)
            if not whole or number not in self._values:
                raise algorithms.MethodError(f"{wanted}, got {number!r} among them.")
        return [int(number) for number in chosen]

    def attach(
        self,
        data: collections.OrderedDict,
        client: int,
        round_num: int,
        helpers: Sequence[int] | None = None,
    ) -> Any:
        """Adds the memories of a client and of its helpers to the client's data.

        Args:
          data: What `FederatedData.client_dataset` gives.
          client: The client's number.
          round_num: The round that the data is for.
          helpers: What `helpers` returned, if it has been called already.

        Returns:
          `data` with `memory=`, a dataset of one element `OrderedDict(client=int32, value=)`, and,
          if the method has helpers, `helpers=`, a dataset of the helpers' values.
        """
        own = self[client] if client in self._values else self._initial
        element = collections.OrderedDict(client=np.int32(client), value=own)
        data = collections.OrderedDict(data, memory=tf.data.Dataset.from_tensors(element))
        if self._choose_helpers is not None:
            helpers = self.helpers(client, round_num) if helpers is None else helpers
            data["helpers"] = self._dataset([self[helper] for helper in helpers])
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
            self._values[int(client)] = [_read_only(column[row]) for column in columns]

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


def _read_only(array: np.ndarray) -> np.ndarray:
    """A copy that cannot be written to."""
    array = np.array(array)
    array.setflags(write=False)
    return array
