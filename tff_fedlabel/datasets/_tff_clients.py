"""Clients from and as a `tff.simulation.datasets.ClientData`."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel.datasets import _client_data_checks
from tff_fedlabel.datasets._client_data_checks import ClientDataError
from tff_fedlabel.datasets.sources import Examples

_BATCH = 256
_IN_ONE_GRAPH = 2**30  # Bytes; a graph cannot hold more than twice that.


def read_clients(
    client_data: tff.simulation.datasets.ClientData, image_key: str, label_key: str
) -> tuple[Examples, list[str], list[np.ndarray]]:
    """Reads all clients into memory: (all images, ids in ascending order, rows of each client).

    Raises:
      ClientDataError: naming the client and the field at fault.
    """
    images, labels, parts, start = [], [], [], 0
    client_ids = sorted(client_data.client_ids)
    for client in client_ids:
        number = 0
        # Batch by batch in NumPy: a `map` would trace a function for each client.
        dataset = client_data.create_tf_dataset_for_client(client)
        _check_spec(client, dataset.element_spec, image_key, label_key)
        for batch in dataset.batch(_BATCH).as_numpy_iterator():
            x, y = batch[image_key], batch[label_key]
            x = x[..., np.newaxis] if x.ndim == 3 else x  # TFF's EMNIST has no channel axis.
            if images and x.shape[1:] != images[0].shape[1:]:
                raise ClientDataError(
                    client,
                    "x",
                    f"images of {list(x.shape[1:])}, others {list(images[0].shape[1:])}",
                )
            _client_data_checks.check_image_spec(client, x.shape[1:], x.dtype)
            if y.ndim != 1:
                raise ClientDataError(client, "y", f"shape of a label is {list(y.shape[1:])}")
            images.append(x)
            labels.append(y)
            number += len(y)
        parts.append(np.arange(start, start + number))
        start += number
    if not images:
        raise ClientDataError(None, "x", "there are no images")
    return Examples(np.concatenate(images), np.concatenate(labels)), client_ids, parts


def _check_spec(client, spec, image_key: str, label_key: str) -> None:
    if not isinstance(spec, Mapping):
        raise ClientDataError(
            client, "x", f"elements are not a mapping with {image_key!r} and {label_key!r}"
        )
    for field, key in (("x", image_key), ("y", label_key)):
        if key not in spec:
            raise ClientDataError(
                client,
                field,
                f"elements have no {key!r}, only {', '.join(map(repr, spec))}; name it as "
                f"{'image_key' if field == 'x' else 'label_key'}",
            )
    _client_data_checks.check_label_dtype(client, spec[label_key].dtype.as_numpy_dtype)


class FederatedClientData(tff.simulation.datasets.ClientData):
    """One part of a `FederatedData`, as TFF's simulations take it.

    `create_tf_dataset_for_client` (and with it `datasets`) reads a client's images when it is
    called. `serializable_dataset_fn` and what is built on it (`dataset_computation`, `preprocess`,
    `create_tf_dataset_from_all_clients`) put all images into one graph, as
    `tff.simulation.datasets.TestClientData` does, and are refused beyond 1 GiB.

    Args:
      arrays: `rows -> OrderedDict(x=, y=)` (or x alone), the images of some rows.
      rows: client id -> row numbers, ids str.
      spec: element spec of single images.
    """

    def __init__(
        self,
        arrays: Callable[[np.ndarray], collections.OrderedDict],
        rows: Mapping[str, np.ndarray],
        spec: collections.OrderedDict,
    ):
        super().__init__()
        self._arrays, self._rows, self._spec = arrays, dict(rows), spec

    @property
    def client_ids(self) -> list[str]:
        return list(self._rows)

    @property
    def element_type_structure(self) -> collections.OrderedDict:
        return self._spec

    def create_tf_dataset_for_client(self, client_id: str) -> tf.data.Dataset:
        """Dataset of single images; ValueError if there is no such client."""
        if client_id not in self._rows:
            raise ValueError(f"client_id {client_id!r} is unknown; see client_ids.")
        with tf.device("/device:CPU:0"):
            return tf.data.Dataset.from_tensor_slices(self._arrays(self._rows[client_id]))

    @property
    def serializable_dataset_fn(self) -> Callable[[str], tf.data.Dataset]:
        number = sum(map(len, self._rows.values()))
        size = sum(spec.dtype.size * spec.shape.num_elements() for spec in self._spec.values())
        if number * size > _IN_ONE_GRAPH:
            raise ValueError(
                f"{number * size / 2**30:.1f} GiB of images do not fit into one graph; use "
                "create_tf_dataset_for_client or datasets."
            )
        return self._dataset_of

    def _dataset_of(self, client_id) -> tf.data.Dataset:
        """The same as a graph with all images in it, in which the client is looked up."""
        ids = tf.constant(self.client_ids)
        of_client = tf.equal(ids, client_id)
        check = tf.debugging.Assert(tf.reduce_any(of_client), ["no such client:", client_id])
        with tf.control_dependencies([check] if check is not None else []):
            number = tf.argmax(tf.cast(of_client, tf.int32))
        ends = np.cumsum([len(rows) for rows in self._rows.values()])
        starts = np.concatenate([[0], ends[:-1]])
        start, end = tf.gather(starts, number), tf.gather(ends, number)
        columns = self._arrays(np.concatenate(list(self._rows.values())))
        own = [(name, tf.constant(column)[start:end]) for name, column in columns.items()]
        return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(own))
