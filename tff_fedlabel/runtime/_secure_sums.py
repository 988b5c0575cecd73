"""The arithmetic of TFF's secure sums, without the cryptography.

A secure sum adds integers that each client has brought into a known range, and the server sees the
sum alone. What that costs in accuracy (clipping and quantization by the aggregator, the range of
the integers) is simulated here exactly:

  federated_secure_sum            sum of values in [0, max_input]
  federated_secure_sum_bitwidth   sum of values in [0, 2**bitwidth - 1]
  federated_secure_modular_sum    sum modulo `modulus` of values in [0, modulus - 1]

A value outside of its range is an error at the client that sends it, as TFF documents it: clients
must clip before. (TFF's compiler itself reduces the summands of a modular sum.) Sums are computed
in 64 bits; one that does not fit in the dtype of its values is an error, where a protocol could
only return a wrong number. What is not simulated: masking, secret sharing, clients that drop out,
the number of clients below which a protocol reveals nothing, and the cost of all that. This process
sees every value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel.runtime._graphs import Graph
from tff_fedlabel.runtime._private_tensorflow import Call
from tff_fedlabel.runtime._runtime_errors import ComputationError

_BITWIDTH = "federated_secure_sum_bitwidth"
_MAX_INPUT = "federated_secure_sum"
_MODULUS = "federated_secure_modular_sum"
_MOST_BITS = 62  # So that int64 holds the sum of two values at least; TFF has the same limit.


@dataclasses.dataclass(frozen=True)
class SecureSums:
    """The secure sums of a computation over clients.

    Attributes:
      plain: How many tensors of a client's update come before its summands.
      types: The types of the summands: those summed by bitwidth, by largest input, by modulus.
      bitwidth, max_input, modulus: Graphs without argument: the bound of each summand.
    """

    plain: int
    types: tuple[list[tff.TensorType], list[tff.TensorType], list[tff.TensorType]]
    bitwidth: Graph
    max_input: Graph
    modulus: Graph

    def start(self, call: Call) -> Running:
        """The sums over no client.

        Raises:
          ComputationError: A bound is none.
        """
        sums = []
        for intrinsic, types, graph in zip(
            (_BITWIDTH, _MAX_INPUT, _MODULUS),
            self.types,
            (self.bitwidth, self.max_input, self.modulus),
            strict=True,
        ):
            bounds = graph([], call) if types else []
            for type_spec, bound in zip(types, bounds, strict=True):
                sums.append(_Sum(intrinsic, int(bound.numpy().item()), type_spec))
        return Running(self.plain, sums)


class Running:
    """The sums over some clients."""

    def __init__(self, plain: int, sums: Sequence[_Sum]):
        self._plain, self._sums = plain, sums

    def add(self, client: int, update: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Adds a client's summands; returns its other values.

        Args:
          client: Its position in the cohort, for messages.
          update: All that it sends.

        Raises:
          ComputationError: A value is out of its range, or a sum does not fit in its dtype.
        """
        for one, value in zip(self._sums, update[self._plain :], strict=True):
            one.add(client, value.numpy())
        return update[: self._plain]

    def results(self) -> list[tf.Tensor]:
        """The sums, in the order of the summands."""
        return [one.result() for one in self._sums]


class _Sum:
    """The sum of one summand over some clients."""

    def __init__(self, intrinsic: str, bound: int, type_spec: tff.TensorType):
        self._intrinsic = intrinsic
        self._modulus = bound if intrinsic == _MODULUS else None
        least = 0 if intrinsic == _MAX_INPUT else 1
        if bound < least or (intrinsic == _BITWIDTH and bound > _MOST_BITS):
            limit = (
                f"in [{least}, {_MOST_BITS}]" if intrinsic == _BITWIDTH else f"of {least} or more"
            )
            raise ComputationError(f"{intrinsic} needs a bound {limit}, got {bound}")
        if intrinsic == _BITWIDTH:
            self._most = 2**bound - 1
        else:
            self._most = bound if intrinsic == _MAX_INPUT else bound - 1
        self._dtype = np.dtype(type_spec.dtype)
        # int64 or uint64. A dimension that is not known is that of the first client.
        self._total = np.zeros([size or 0 for size in type_spec.shape], f"{self._dtype.kind}8")
        self._is_empty = True

    def add(self, client: int, value: np.ndarray) -> None:
        if value.size:
            least, most = int(value.min()), int(value.max())
            if least < 0 or most > self._most:
                raise ComputationError(
                    f"client {client} of the cohort sends {least if least < 0 else most} to "
                    f"{self._intrinsic}, which takes values from 0 to {self._most}; clip them first"
                )
        value = value.astype(self._total.dtype)
        with np.errstate(over="ignore"):  # NumPy warns of a scalar only
            total = value if self._is_empty else self._total + value
        # Both are 0 or more: a sum that wrapped around is smaller than each of them.
        if (total < value).any():
            self._raise_overflow()
        self._total = total if self._modulus is None else total % total.dtype.type(self._modulus)
        self._is_empty = False

    def result(self) -> tf.Tensor:
        if self._total.size and int(self._total.max()) > np.iinfo(self._dtype).max:
            self._raise_overflow()
        return tf.constant(self._total.astype(self._dtype))

    def _raise_overflow(self):
        raise ComputationError(
            f"the sum of {self._intrinsic} over the cohort does not fit in {self._dtype}; give the "
            "values fewer bits, or a wider dtype"
        )
