"""A `FederatedData` as a data source for `tff.program`.

`tff.learning.programs.train_model` asks a data source for the clients of each round and keeps the
position of its iterator in every checkpoint. Here that position is two numbers, the seed and the
round, and the clients and their batches follow from it: a program that was killed goes on with the
clients that it would have had. TFF's own `DatasetDataSource` draws with `random.sample`, without a
seed, and puts the data of all clients into each checkpoint.
"""

import collections
import hashlib
import json
import weakref

import tensorflow_federated as tff

from tff_fedlabel._validation import check_int
from tff_fedlabel.datasets import _round_batches

# Identity -> source. What is read from a checkpoint is bytes; TFF hands over nothing else to find
# the data with.
_SOURCES: "weakref.WeakValueDictionary[str, RoundDataSource]" = weakref.WeakValueDictionary()


class DataSourceError(ValueError):
    """A checkpoint was written with another data source than those of this process."""


class RoundDataSource(tff.program.FederatedDataSource):
    """The clients of each round. Made by `FederatedData.data_source` and `.evaluation_source`.

    Two sources of the same data with the same options are the same.

    Attributes:
      federated_type: `{<labeled=<x=,y=>*,unlabeled=<x=>*>}@CLIENTS`, or `{<x=,y=>*}@CLIENTS` of an
        evaluation source; batched, with the dtypes and shapes of the data.
      identity: 16 hexadecimal digits that change with the data and the options.
    """

    def __init__(self, data, options: _round_batches.RoundOptions, labeled_only: bool = False):
        """Takes checked options.

        Args:
          data: The `FederatedData`.
          options: How a client's batches are made.
          labeled_only: Whether an element is the labelled batches alone.
        """
        self._data, self._options, self._labeled_only = data, options, labeled_only
        spec = data.element_spec(options.with_hidden_labels)
        member = collections.OrderedDict(
            (name, tff.SequenceType(tff.types.tensorflow_to_type(element)))
            for name, element in spec.items()
        )
        self._type = tff.FederatedType(
            member["labeled"] if labeled_only else tff.to_type(member), tff.CLIENTS
        )
        text = f"{data.fingerprint()} {options} {labeled_only}"
        self.identity = hashlib.sha256(text.encode()).hexdigest()[:16]
        _SOURCES[self.identity] = self

    def __repr__(self) -> str:
        return f"RoundDataSource({self._data!r}, {self._options})"

    @property
    def federated_type(self) -> tff.FederatedType:
        return self._type

    @property
    def seed(self) -> int:
        return self._options.seed

    def iterator(self) -> "RoundDataSourceIterator":
        """An iterator before its first round."""
        return RoundDataSourceIterator(self)

    def clients(self, number: int | None, round_num: int) -> _round_batches.Cohort:
        """The data of `number` clients, drawn without replacement from (seed, round_num) alone.

        Args:
          number: How many; None is all.
          round_num: 0 in the first round.
        """
        ids = self._data.client_ids
        number = len(ids) if number is None else number
        drawn = self._data.draw_clients(number, round_num, self.seed)
        cohort = self._data.checked_cohort([ids[i] for i in drawn], round_num, self._options)
        return cohort.part("labeled") if self._labeled_only else cohort


class RoundDataSourceIterator(tff.program.FederatedDataSourceIterator):
    """A position in a `RoundDataSource`: the number of the next round.

    Attributes:
      round_num: The number of rounds that were selected.
    """

    def __init__(self, source: RoundDataSource, round_num: int = 0):
        self._source, self.round_num = source, round_num

    @property
    def federated_type(self) -> tff.FederatedType:
        return self._source.federated_type

    def select(self, k: int | None = None) -> _round_batches.Cohort:
        """The data of the next round's clients, the same in every run.

        Args:
          k: Number of clients; None is all of them.

        Returns:
          A sequence with one element for each client, built when it is read.

        Raises:
          ValueError: There are fewer clients than `k`, or `k` is not a number of 1 or more.
        """
        clients = self._source.clients(k, self.round_num)
        self.round_num += 1
        return clients

    def to_bytes(self) -> bytes:
        """The position, and the identity of the source, as JSON; no data."""
        position = {
            "seed": self._source.seed,
            "round": self.round_num,
            "source": self._source.identity,
        }
        return json.dumps(position).encode()

    @classmethod
    def from_bytes(cls, buffer: bytes) -> "RoundDataSourceIterator":
        """The iterator at a position from `to_bytes`, in this process or another one.

        Raises:
          DataSourceError: This process has no such source: its data or its options are not those
            of the process that wrote `buffer`.
        """
        try:
            position = json.loads(buffer)
            identity = str(position["source"])
            round_num = check_int("round", position["round"], 0)
        except (ValueError, KeyError, TypeError):
            raise DataSourceError(
                f"{bytes(buffer)[:40]!r} is not the position of a data source of tff_fedlabel."
            ) from None
        source = _SOURCES.get(identity)
        if source is None:
            raise DataSourceError(
                "the saved program state belongs to another data source (other data, steps, batch "
                "size or seed): make the source as it was made then, or save to another folder."
            )
        return cls(source, round_num)

    def __deepcopy__(self, memo) -> "RoundDataSourceIterator":
        # TFF copies the iterator twice a round; the source is shared, data and all.
        return RoundDataSourceIterator(self._source, self.round_num)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoundDataSourceIterator):
            return NotImplemented
        return self.to_bytes() == other.to_bytes()

    __hash__ = None  # It changes with `select`.

    def __repr__(self) -> str:
        return f"RoundDataSourceIterator({self._source!r}, round {self.round_num})"
