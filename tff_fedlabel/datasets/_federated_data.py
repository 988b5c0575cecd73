"""The images of many clients, and the batches that a client hands to a method."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel._validation import WrongTypeError, check_int, check_name, check_seed, nearest
from tff_fedlabel.datasets import _round_batches, _tff_clients
from tff_fedlabel.datasets._client_columns import ClientId
from tff_fedlabel.datasets._fingerprint import Fingerprint

if TYPE_CHECKING:
    from tff_fedlabel.datasets import data_source


class FederatedData:
    """Images of many clients, each image labelled or not. Made by the functions of this module.

    Attributes:
      client_ids: list of str or int, in ascending order.
      num_classes: number of classes.
      label_names: tuple of `num_classes` names.
      hidden_y: int32 [n] true labels of all images, or None if they are not known. They are for
        diagnosis in simulations and appear in training batches only on request.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        rows: Mapping[ClientId, tuple[np.ndarray, np.ndarray]],
        *,
        num_classes: int,
        label_names: Sequence[str] | None = None,
        hidden_y: np.ndarray | None = None,
    ):
        """Takes checked arguments: see `from_arrays`, `from_datasets`, `from_source`.

        Args:
          x: uint8 or float32 [n, h, w, c], or [n, d].
          y: int32 [n], -1 where not labelled.
          rows: client id -> (labelled, unlabelled) row numbers.
          num_classes: number of classes.
          label_names: names of the classes; default "0", "1", ...
          hidden_y: int32 [n] or None.
        """
        self._x = x
        self._y = y
        self._rows = dict(rows)
        self.client_ids = list(self._rows)
        self.num_classes = int(num_classes)
        if label_names is None:
            label_names = map(str, range(self.num_classes))
        self.label_names = tuple(map(str, label_names))
        self.hidden_y = hidden_y

    def __repr__(self) -> str:
        labeled = sum(len(labeled) for labeled, _ in self._rows.values())
        unlabeled = sum(len(unlabeled) for _, unlabeled in self._rows.values())
        return (
            f"FederatedData({len(self.client_ids)} clients, {labeled} labelled and {unlabeled} "
            f"unlabelled {self._x.dtype} images {list(self._x.shape[1:])}, "
            f"{self.num_classes} classes)"
        )

    @property
    def input_spec(self) -> collections.OrderedDict:
        """Element spec of a labelled batch: OrderedDict(x=[None, ...], y=int32 [None])."""
        return collections.OrderedDict(
            x=tf.TensorSpec([None, *self._x.shape[1:]], tf.as_dtype(self._x.dtype)),
            y=tf.TensorSpec([None], tf.int32),
        )

    def element_spec(self, with_hidden_labels: bool = False) -> collections.OrderedDict:
        """Element specs of what `client_dataset` gives: OrderedDict(labeled=, unlabeled=)."""
        unlabeled = self.input_spec
        if not with_hidden_labels:
            del unlabeled["y"]
        return collections.OrderedDict(labeled=self.input_spec, unlabeled=unlabeled)

    def sizes(self) -> pd.DataFrame:
        """Images by client: columns client_id, labeled, unlabeled, total."""
        labeled = [len(labeled) for labeled, _ in self._rows.values()]
        unlabeled = [len(unlabeled) for _, unlabeled in self._rows.values()]
        frame = pd.DataFrame(
            {"client_id": self.client_ids, "labeled": labeled, "unlabeled": unlabeled}
        )
        frame["total"] = frame["labeled"] + frame["unlabeled"]
        return frame

    def class_counts(self, part: str = "all") -> np.ndarray:
        """Images by client and class.

        Args:
          part: "labeled", "unlabeled" or "all"; the latter two need hidden labels.

        Returns:
          int64 [clients, num_classes], clients in the order of `client_ids`.

        Raises:
          ValueError: unknown `part`, or hidden labels are not known.
        """
        check_name("part", part, ("labeled", "unlabeled", "all"))
        labels = self._y if part == "labeled" else self._known_hidden("class_counts")
        counts = np.zeros((len(self.client_ids), self.num_classes), np.int64)
        for client, (labeled, unlabeled) in enumerate(self._rows.values()):
            if part != "unlabeled":
                counts[client] += np.bincount(labels[labeled], minlength=self.num_classes)
            if part != "labeled":
                counts[client] += np.bincount(labels[unlabeled], minlength=self.num_classes)
        return counts

    def client_dataset(
        self,
        client_id: ClientId,
        round_num: int,
        *,
        labeled_steps: int | None,
        unlabeled_steps: int | None,
        batch_size: int,
        unlabeled_batch_size: int | None = None,
        seed: int = 0,
        with_hidden_labels: bool = False,
    ) -> collections.OrderedDict:
        """One client's batches for one round, as `process.next` takes them.

        The order is that of shuffle, repeat, batch, take: each pass over the client's images is
        in a new order, drawn from (seed, round_num, client_id) alone. Only row numbers are
        shuffled, so the datasets hold the images of this round's batches and nothing else.

        Args:
          client_id: one of `client_ids`.
          round_num: number of the round, >= 0.
          labeled_steps: tau, the number of labelled batches, all full: images repeat if there are
            too few. None is one pass over all images, the last batch partial.
          unlabeled_steps: tau', the same for unlabelled batches.
          batch_size: images in a batch.
          unlabeled_batch_size: images in an unlabelled batch, default `batch_size`.
          seed: in [0, 2**31).
          with_hidden_labels: unlabelled batches carry their true labels as `y`, for builders made
            with `diagnose=True`.

        Returns:
          OrderedDict(labeled=Dataset of OrderedDict(x, y), unlabeled=Dataset of OrderedDict(x)),
          x of the data's dtype [b, ...], y int32 [b]. A part without images has no batches.

        Raises:
          ValueError: unknown client, a number out of range, or hidden labels requested but not
            known. `WrongTypeError`, which is a ValueError too, if a type is wrong.
        """
        client_id = self._known_client(client_id)
        round_num = check_int("round_num", round_num, 0)
        options = self._round_options(
            labeled_steps=labeled_steps,
            unlabeled_steps=unlabeled_steps,
            batch_size=batch_size,
            unlabeled_batch_size=unlabeled_batch_size,
            seed=seed,
            with_hidden_labels=with_hidden_labels,
        )
        return self._client_dataset(client_id, round_num, options)

    def cohort(
        self, clients: Sequence[ClientId], round_num: int, **options: Any
    ) -> _round_batches.Cohort:
        """The client data of one round; each client's is built on access.

        Args:
          clients: the clients that take part, in order; one may occur twice.
          round_num: number of the round, >= 0.
          **options: keyword arguments of `client_dataset`.

        Returns:
          An immutable sequence; its item k is `client_dataset(clients[k], round_num, **options)`,
          built anew on each access, in the accessing thread. `list(...)` builds and keeps them all.

        Raises:
          ValueError: as `client_dataset`, at once and for all clients.
          TypeError: an option is unknown to `client_dataset`, or a required one is missing.
        """
        if isinstance(clients, str) or not isinstance(clients, Iterable):
            raise WrongTypeError(f"clients must be a sequence of client ids, got {clients!r}.")
        known = [self._known_client(client) for client in clients]
        round_num = check_int("round_num", round_num, 0)
        return self.checked_cohort(known, round_num, self._round_options(**options))

    def checked_cohort(
        self, clients: Sequence[ClientId], round_num: int, options: _round_batches.RoundOptions
    ) -> _round_batches.Cohort:
        """`cohort` of arguments that were checked before."""
        return _round_batches.Cohort(
            lambda client: self._client_dataset(client, round_num, options), clients, round_num
        )

    def draw_clients(self, number: int, round_num: int, seed: int = 0) -> np.ndarray:
        """The clients of a round, drawn without replacement from (seed, round_num) alone.

        Args:
          number: how many.
          round_num: number of the round, >= 0.
          seed: in [0, 2**31).

        Returns:
          int64 [number] positions in `client_ids`. Every set of clients is equally likely, and
          rounds are independent.

        Raises:
          ValueError: fewer clients than `number`, or an argument out of its range.
        """
        clients = len(self.client_ids)
        number = check_int("number of clients", number, 1, clients + 1)
        round_num = check_int("round_num", round_num, 0)
        return _round_batches.draw_clients(clients, number, round_num, check_seed(seed))

    def data_source(self, **options: Any) -> "data_source.RoundDataSource":
        """The clients of each round for `tff.program`, for example `train_model`.

        Its iterator draws clients as `draw_clients` does; what it keeps in a checkpoint is the seed
        and the round. A client's data is its `client_dataset`.

        Args:
          **options: keyword arguments of `client_dataset`; the seed is also that of the draws.

        Raises:
          ValueError, TypeError: as `cohort`.
        """
        from tff_fedlabel.datasets import data_source  # Imports TensorFlow Federated.

        return data_source.RoundDataSource(self, self._round_options(**options))

    def evaluation_source(self, *, batch_size: int, seed: int = 0) -> "data_source.RoundDataSource":
        """Each client's labelled images once, for `tff.learning.algorithms.build_fed_eval`.

        Args:
          batch_size: images in a batch; the last one holds what is left.
          seed: of the order and, where a round does not take all clients, of the draws.
        """
        from tff_fedlabel.datasets import data_source

        options = self._round_options(
            labeled_steps=None, unlabeled_steps=1, batch_size=batch_size, seed=seed
        )
        return data_source.RoundDataSource(self, options, labeled_only=True)

    def client_examples(self, client_id: ClientId) -> tf.data.Dataset:
        """One client's images one by one, in the order of the data.

        Args:
          client_id: one of `client_ids`.

        Returns:
          Dataset of OrderedDict(x [...], y int32 []), not batched; y is -1 where not labelled.
        """
        rows = np.sort(np.concatenate(self._rows[self._known_client(client_id)]))
        with tf.device("/device:CPU:0"):
            return tf.data.Dataset.from_tensor_slices(
                collections.OrderedDict(x=self._x[rows], y=self._y[rows])
            )

    def fingerprint(self) -> str:
        """64 hexadecimal digits (SHA-256) that change when any of the data changes.

        It covers dtype, shape and values of images, labels and hidden labels, which client holds
        which rows, which of them are labelled, and the number of classes, but not the class names.
        It is the same in every process and on every machine.
        """
        result = Fingerprint("FederatedData")
        result.add_text(str(self.num_classes))
        for array in (self._x, self._y, self.hidden_y):
            if array is not None:
                result.add_array(array)
        for client, parts in self._rows.items():
            result.add_text(repr(client))
            for part in parts:
                result.add_array(np.asarray(part, np.int64))
        return result.hex()

    def labeled_arrays(self) -> collections.OrderedDict:
        """All labelled images of all clients, in the form for methods that train at the server.

        Returns:
          OrderedDict(x=[n, ...], y=int32 [n]), in the order of the clients.
        """
        rows = np.concatenate([labeled for labeled, _ in self._rows.values()])
        return collections.OrderedDict(x=self._x[rows], y=self._y[rows])

    def to_client_data(self, part: str = "labeled") -> tff.simulation.datasets.ClientData:
        """The images of each client as TFF's simulations and tutorials take them.

        Args:
          part: "labeled": elements OrderedDict(x, y), for supervised training; "unlabeled":
            OrderedDict(x); "all": OrderedDict(x, y), first the labelled images, with y -1 where an
            image has no label.

        Returns:
          A `tff.simulation.datasets.ClientData`; client ids are str. A client's images are read
          when its dataset is made. `serializable_dataset_fn`, and what TFF builds on it, puts all
          images into one graph, and so is for 1 GiB at most.

        Raises:
          ValueError: unknown `part`.
        """
        check_name("part", part, ("labeled", "unlabeled", "all"))
        chosen = {
            "labeled": lambda pair: pair[0],
            "unlabeled": lambda pair: pair[1],
            "all": np.concatenate,
        }[part]
        rows = {str(client): chosen(pair) for client, pair in self._rows.items()}

        def arrays(rows):
            columns = collections.OrderedDict(x=self._x[rows])
            if part != "unlabeled":
                columns["y"] = self._y[rows]
            return columns

        spec = collections.OrderedDict(
            (name, tf.TensorSpec(column.shape[1:], column.dtype))
            for name, column in self.input_spec.items()
            if part != "unlabeled" or name == "x"
        )
        return _tff_clients.FederatedClientData(arrays, rows, spec)

    def client_arrays(self, client_id: ClientId, part: str = "labeled") -> collections.OrderedDict:
        """A client's images with their true labels, in a fixed order.

        Args:
          client_id: one of `client_ids`.
          part: "labeled", or "unlabeled", which needs hidden labels.

        Returns:
          OrderedDict(x=[n, ...], y=int32 [n]).

        Raises:
          ValueError: unknown client or `part`, or hidden labels are not known.
        """
        check_name("part", part, ("labeled", "unlabeled"))
        labels = self._y if part == "labeled" else self._known_hidden("client_arrays")
        rows = self._rows[self._known_client(client_id)][part == "unlabeled"]
        return collections.OrderedDict(x=self._x[rows], y=labels[rows])

    def all_labeled(self) -> "FederatedData":
        """The same images, all labelled: the training data of an upper bound.

        Raises:
          ValueError: the true labels of the unlabelled images are not known.
        """
        hidden = self._known_hidden("all_labeled")
        none = np.zeros(0, np.int64)
        rows = {
            client: (np.sort(np.concatenate(parts)), none) for client, parts in self._rows.items()
        }
        return FederatedData(
            self._x,
            hidden,
            rows,
            num_classes=self.num_classes,
            label_names=self.label_names,
            hidden_y=hidden,
        )

    def _known_hidden(self, purpose: str) -> np.ndarray:
        if self.hidden_y is None:
            raise ValueError(
                f"{purpose} needs the true labels of the unlabelled images, which are not known "
                "here (give hidden_y to from_arrays)"
            )
        return self.hidden_y

    def _known_client(self, client_id: ClientId) -> ClientId:
        """`client_id` in the form it has in `client_ids`."""
        plain = client_id.item() if isinstance(client_id, np.generic) else client_id
        if isinstance(plain, bool) or not isinstance(plain, str | int):
            raise WrongTypeError(f"client_id must be a str or an integer, got {client_id!r}.")
        if plain not in self._rows:
            hint = nearest(repr(plain), map(repr, self._rows))
            raise ValueError(f"client_id {plain!r} is unknown{hint}; see client_ids.")
        return plain

    def _round_options(self, **options) -> _round_batches.RoundOptions:
        checked = _round_batches.RoundOptions(**options)
        if checked.with_hidden_labels:
            self._known_hidden("with_hidden_labels")
        return checked

    def _client_dataset(self, client_id, round_num, options) -> collections.OrderedDict:
        labeled, unlabeled = _round_batches.client_rows(
            *self._rows[client_id], client_id, round_num, options
        )
        parts = [self._x[unlabeled]]
        if options.with_hidden_labels:
            parts.append(self.hidden_y[unlabeled])
        return _round_batches.client_datasets(
            (self._x[labeled], self._y[labeled]), tuple(parts), options
        )
