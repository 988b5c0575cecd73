"""Runs compiled computations: the server's part in the caller's thread, clients in a pool."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel.runtime._compiling import LocalPlan, RoundPlan
from tff_fedlabel.runtime._dataset_variants import DatasetReader
from tff_fedlabel.runtime._graphs import flatten, unflatten
from tff_fedlabel.runtime._private_tensorflow import Call
from tff_fedlabel.runtime._runtime_errors import ComputationError


class ClientError(Exception):
    """The sequence of clients failed to return one of them.

    Attributes:
      cause: The exception that it raised instead.
    """

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class Rounds:
    """Computations on a set of devices.

    Args:
      devices: Names of the TensorFlow devices that clients are spread over; the server's part is
        computed on the first.
      in_flight: How many clients are computed at once.
      measurement: Called before each client; returns None, or `measured(work)`, which is to return
        what `work()` does. A client that is measured is computed alone.
    """

    def __init__(
        self,
        devices: Sequence[str],
        in_flight: int,
        measurement: Callable[[], Callable | None],
    ):
        self.devices = devices
        self._in_flight = in_flight
        self._measurement = measurement
        self._pool = concurrent.futures.ThreadPoolExecutor(in_flight, "tff-device")
        self._datasets = DatasetReader()

    def close(self) -> None:
        """Ends the threads; nothing may run any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(
        self, plan: LocalPlan | RoundPlan, type_spec: tff.FunctionType, argument, call: Call
    ) -> object:
        """Computes a plan's result for an argument.

        Args:
          plan: The compiled computation.
          type_spec: Its type.
          argument: Its argument, or None. Values of clients are any sequence.
          call: The call by which it can be cancelled.

        Raises:
          ClientError: The sequence of clients failed.
          TypeError: The argument does not fit.
          tf.errors.OpError: The computation failed; `call.cause` may hold the reason.
        """
        run = self._local if isinstance(plan, LocalPlan) else self._round
        with tf.device(self.devices[0]):
            results = run(plan, type_spec.parameter, argument, call)
            return unflatten(results, type_spec.result)

    def _local(self, plan: LocalPlan, parameter, argument, call) -> list[tf.Tensor]:
        if parameter is None:
            return plan.graph([], call)
        return plan.graph(flatten(argument, parameter, self._datasets.as_given), call)

    def _round(self, plan: RoundPlan, _, argument, call) -> list[tf.Tensor]:
        server, clients = plan.split(argument)
        state = flatten(server, plan.server_type, self._datasets.as_given)
        context = plan.prepare(state, call)
        total = plan.zero([], call)
        secure = plan.secure_sums.start(call)
        with contextlib.closing(self._updates(plan, clients, context, call)) as updates:
            for number, update in enumerate(updates):
                total = plan.accumulate(total + secure.add(number, update), call)
        sums = plan.report(total, call) + secure.results()
        return plan.update(state + sums, call)[plan.skip :]

    def _updates(self, plan, clients, context, call) -> Iterator[list[tf.Tensor]]:
        """The clients' updates in the clients' order, with a bounded number in flight."""
        waiting: collections.deque[concurrent.futures.Future] = collections.deque()
        try:
            for number in range(len(clients)):
                work = (plan, clients, number, context, call)
                measured = self._measurement()
                if measured is not None:
                    yield measured(lambda work=work: self._work(*work))
                    continue
                if len(waiting) == self._in_flight:
                    yield waiting.popleft().result()
                waiting.append(self._pool.submit(self._work, *work))
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            call.cancel()  # the other clients' work is no longer needed
            raise
        finally:
            for future in waiting:
                future.cancel()
            concurrent.futures.wait(waiting)

    def _work(self, plan, clients, number, context, call) -> list[tf.Tensor]:
        """One client's update. Its data is built here and released afterwards."""
        sets_options = plan.work.sets_dataset_options
        to_dataset = self._datasets.as_given if sets_options else self._datasets.for_clients
        try:
            with tf.device(self.devices[number % len(self.devices)]):
                data = flatten(_client(clients, number), plan.client_type, to_dataset)
                return plan.work(data + context, call)
        except Exception as error:
            call.failed(error)
            raise


def _client(clients: Sequence, number: int):
    try:
        return clients[number]
    except StopIteration as error:
        # Passed on, it would end somebody's generator; a future or a coroutine refuses it.
        reason = f": {error}" if str(error) else ""
        raise ClientError(
            ComputationError(
                f"the sequence of clients raised StopIteration for client {number} of "
                f"{len(clients)}{reason}; its __getitem__ must return that client's data"
            )
        ) from error
    except Exception as error:
        raise ClientError(error) from error
