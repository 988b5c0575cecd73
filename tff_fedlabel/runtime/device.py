"""TFF computations on the TensorFlow of this process, GPUs included.

The released TFF worker is built without CUDA, so nothing that runs through it can use a GPU. Here a
computation is converted to TFF's map-reduce form once (`_compiling`), its graphs are imported into
this process (`_graphs`), and a round is

  context = prepare(state)                      on the first device
  update_k = work(data_k, context)              clients in turn, spread over devices or CPU cores
  sum = accumulate(sum, update_k)               always in the order of the clients
  state, metrics = update(state, report(sum))

No process is started and no port is opened. The order in which clients are summed does not depend
on which is done first, so on CPUs a run is reproducible bit for bit; on GPUs some of TensorFlow's
operations are not, unless `deterministic=True`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import tensorflow as tf
import tensorflow_federated as tff
from absl import logging

from tff_fedlabel.runtime import _cuda, _determinism, _option_checks, _private_tensorflow
from tff_fedlabel.runtime._compiling import LocalPlan, RoundPlan, compile_computation
from tff_fedlabel.runtime._contexts import AsyncContext, SyncContext
from tff_fedlabel.runtime._graphs import Graph
from tff_fedlabel.runtime._option_checks import option, or_none
from tff_fedlabel.runtime._private_tensorflow import Call
from tff_fedlabel.runtime._rounds import ClientError, Rounds
from tff_fedlabel.runtime._runtime_errors import ComputationError, DeviceError, readable

__all__ = ["DeviceRuntime", "Options", "find_gpus", "placement_report", "share_cores", "start"]

_CALLS = 32  # concurrent computations; further ones wait


@dataclasses.dataclass(frozen=True)
class Options(_option_checks.CheckedOptions):
    """The options of the runtime.

    Attributes:
      max_concurrent_clients: How many clients are computed at once; by default two for each GPU,
        or one for each CPU core that this process may use. Fewer take less memory.
      deterministic: Turns on TensorFlow's op determinism, for the rest of the process: then runs
        on a GPU are also reproducible bit for bit, but slower. What TensorFlow refuses there is
        computed on the CPU; `_determinism` has the list.
      require_gpu: Raise `DeviceError` if no GPU is visible, or if none of the clients' operations
        ran on one.
      simulate_secure_aggregation: Compute TFF's secure sums as sums of integers with the ranges,
        moduli and failures of the real ones, to see what an aggregator's clipping and quantization
        cost. Nothing is hidden: there is no cryptography, and this process sees the values of each
        client. Otherwise secure sums are refused. `_secure_sums` says what is simulated.

    Raises:
      ValueError: A bad value.
    """

    max_concurrent_clients: int | None = option(or_none(_option_checks.integer(1)), None)
    deterministic: bool = option(_option_checks.flag, False)
    require_gpu: bool = option(_option_checks.flag, False)
    simulate_secure_aggregation: bool = option(_option_checks.flag, False)


@contextlib.contextmanager
def start(**options) -> Iterator[DeviceRuntime]:
    """Runs computations in this process for the duration of a `with` block.

    The values of the clients may be any `collections.abc.Sequence`. The data of a client is read
    in the thread that computes it, when its turn comes, and released afterwards: only the data of
    the clients in flight is held, however many clients there are.

    A computation returns NumPy values. Arrays among them are read-only; one that is passed to the
    next computation unchanged is neither converted nor copied.

    TensorFlow divides each operation among all cores, even while other clients keep them busy;
    `share_cores`, called first, saves that cost.

    Args:
      **options: See `Options`.

    Yields:
      A `DeviceRuntime`.

    Raises:
      ValueError: See `Options`.
      DeviceError: `require_gpu` and no GPU is visible to TensorFlow.
    """
    chosen = Options(**options)
    gpus = find_gpus(chosen.require_gpu)
    for gpu in gpus:
        # Fails once a device is in use; then the choice made at its first use stands.
        with contextlib.suppress(RuntimeError, ValueError):
            tf.config.experimental.set_memory_growth(gpu, True)
    if chosen.deterministic:
        tf.config.experimental.enable_op_determinism()
    runtime = DeviceRuntime(
        chosen.max_concurrent_clients, chosen.require_gpu, chosen.simulate_secure_aggregation
    )
    try:
        yield runtime
    finally:
        runtime.close()


def share_cores(clients: int) -> None:
    """Limits the threads of one TensorFlow operation to a client's share of the cores.

    Dividing an operation costs time, and gains nothing while other clients keep the cores busy: on
    two cores a FedLabel round of a small CNN takes a fifth less with one thread per operation
    (`experiments/benchmark.py --benchmark cores`). The limit applies to the whole process, also to
    what is computed outside of clients; hence `start` leaves it to the program.

    It does nothing if TensorFlow has already run an operation, after which its threads cannot be
    changed; if the environment has TF_NUM_INTRAOP_THREADS; and on a machine with a GPU.

    Args:
      clients: Clients that are computed at once, if there are cores for them.
    """
    if "TF_NUM_INTRAOP_THREADS" in os.environ or find_gpus():
        return
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(max(1, _cores() // clients))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def find_gpus(required: bool = False) -> list[tf.config.PhysicalDevice]:
    """The GPUs that TensorFlow sees.

    TensorFlow looks for them only when first asked, so this function should be the first to ask:
    it loads the CUDA libraries that TensorFlow would not find.

    Raises:
      DeviceError: One is required and there is none; the message says what is missing.
    """
    _cuda.load_libraries()
    gpus = tf.config.list_physical_devices("GPU")
    if required and not gpus:
        raise DeviceError(f"no GPU is visible to TensorFlow: {_cuda.why_no_gpu()}")
    return gpus


class DeviceRuntime:
    """The contexts of the runtime: `context` and `async_context`, each a normal TFF one.

    Attributes:
      placement: "CPU", "GPU" -> number of one client's operations that ran there, once measured:
        on a machine with a GPU, with the first client; elsewhere see `measure_placement`.
      operations: The same in detail: `_private_tensorflow.Operation` -> number.
    """

    processes: tuple[int, ...] = ()

    def __init__(
        self, max_concurrent_clients: int | None, require_gpu: bool, simulates_secure: bool
    ):
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        self.placement: collections.Counter | None = None
        self.operations: collections.Counter | None = None
        self._on_gpu = devices[0].device_type == "GPU"
        self._measures = self._on_gpu
        self._require_gpu = require_gpu
        self._simulates_secure = simulates_secure
        default = 2 * len(devices) if self._on_gpu else _cores()
        in_flight = max_concurrent_clients or max(default, len(devices))
        self._rounds = Rounds(
            tuple(device.name for device in devices), in_flight, self._measurement
        )
        # A separate pool, so that no computation waits for a thread that it holds itself.
        self._callers = concurrent.futures.ThreadPoolExecutor(_CALLS, "tff-device-caller")
        self._plans: dict[int, tuple[weakref.ref, LocalPlan | RoundPlan]] = {}
        self._compiling = threading.Lock()
        self._measuring = threading.Lock()
        self._calls: dict[concurrent.futures.Future, Call] = {}
        self._closed = False
        self.context = SyncContext(self)
        self.async_context = AsyncContext(self)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the TensorFlow devices that clients are spread over."""
        return self._rounds.devices

    def check(self) -> None:
        """Raises `ComputationError` if the runtime has ended."""
        if self._closed:
            raise ComputationError(
                "this runtime has ended: call computations inside its `with` block"
            )

    def measure_placement(self) -> None:
        """Measures the next client; computations compiled before are compiled again."""
        self.placement = self.operations = None
        self._measures = True
        self._plans.clear()

    def close(self) -> None:
        """Cancels what still runs in other threads, and ends."""
        self._closed = True
        for call in list(self._calls.values()):
            call.cancel()
        self._callers.shutdown(wait=True, cancel_futures=True)
        self._rounds.close()
        self._plans.clear()

    def submit(self, comp: tff.framework.ConcreteComputation, argument):
        """See `_contexts.Backend`."""
        call = Call()
        try:
            future = self._callers.submit(self._run, comp, argument, call)
        except RuntimeError:
            self.check()  # raises if it ended a moment ago
            raise
        self._calls[future] = call
        future.add_done_callback(lambda done: self._calls.pop(done, None))
        if self._closed:
            call.cancel()
        return future

    def cancel(self, future) -> None:
        """See `_contexts.Backend`."""
        future.cancel()
        call = self._calls.get(future)
        if call is not None:
            call.cancel()

    def _run(self, comp, argument, call: Call):
        try:
            return self._rounds.run(self._plan(comp), comp.type_signature, argument, call)
        except Exception as error:
            call.cancel()
            self.check()
            if isinstance(error, tf.errors.CancelledError) and call.cause is not None:
                error = call.cause
            if isinstance(error, ClientError):
                raise error.cause  # noqa: B904 (as the sequence of clients raised it)
            if isinstance(error, tf.errors.OpError):
                raise ComputationError(
                    f"the computation failed: {readable(error.message)}"
                ) from error
            raise error

    def _plan(self, comp) -> LocalPlan | RoundPlan:
        plan = self._known_plan(comp)
        if plan is None:
            # Computations that are compiled already do not wait for this lock.
            with self._compiling:
                plan = self._known_plan(comp)
                if plan is None:
                    plan = compile_computation(comp, self._simulates_secure)
                    if self._on_gpu and _private_tensorflow.op_determinism_is_enabled():
                        _keep_refused_on_cpu(plan)
                    forget = functools.partial(self._plans.pop, id(comp), None)
                    self._plans[id(comp)] = (weakref.ref(comp, lambda _: forget()), plan)
        return plan

    def _known_plan(self, comp) -> LocalPlan | RoundPlan | None:
        # Not keyed by the computation itself: its hash serializes all of it.
        known, plan = self._plans.get(id(comp), (lambda: None, None))
        return plan if known() is comp else None

    def _measurement(self) -> Callable | None:
        """The function that runs the next client's work if it is to be measured, else None."""
        return self._measured if self._measures and self.placement is None else None

    def _measured(self, work: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """The first client's update, with a report of where its operations ran."""
        with self._measuring:
            update, operations = _private_tensorflow.operations_by_device(work)
        placement = _private_tensorflow.by_kind(operations)
        if placement.total():  # else it ran before; the next computation is measured
            report = placement_report(placement)
            logging.info("%s", report)
            if self._require_gpu and not placement["GPU"]:
                self._plans.clear()  # so that another try measures again
                raise DeviceError(f"a GPU is required, but {report}")
            self.placement, self.operations = placement, operations
        return update


def _keep_refused_on_cpu(plan: LocalPlan | RoundPlan) -> None:
    """Must run before the plan's graphs are imported, which their first call does."""
    for graph in vars(plan).values():
        if isinstance(graph, Graph):
            _determinism.keep_on_cpu(graph.graph_def)


def placement_report(placement: collections.Counter) -> str:
    """One line: which share of a client's operations ran where."""
    total = sum(placement.values())
    if not total:
        return "TensorFlow did not report where the client's operations ran"
    shares = ", ".join(
        f"{count / total:.0%} on {kind}" for kind, count in sorted(placement.items(), reverse=True)
    )
    return f"the client's {total} operations ran {shares}"
