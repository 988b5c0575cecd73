"""TFF computations on the TensorFlow of this process, GPUs included.

The released TFF worker is built without CUDA, so nothing that runs through it can use a GPU. Here a
computation is brought into TFF's map-reduce form once (`_compiling`), its graphs are imported into
this process (`_graphs`), and a round is

  context = prepare(state)                      on the first device
  update_k = work(data_k, context)              clients in turn, spread over devices or CPU cores
  sum = accumulate(sum, update_k)               always in the order of the clients
  state, metrics = update(state, report(sum))

No process is started and no port is opened. The order in which clients are summed does not depend
on which is done first, so on CPUs a run repeats itself bit for bit; on GPUs some of TensorFlow's
operations do not, unless `deterministic=True`.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Iterator

import tensorflow as tf
import tensorflow_federated as tff
from absl import logging

from tff_fedlabel.runtime import _cuda, _determinism, _private_tensorflow
from tff_fedlabel.runtime._checks import check_flag, check_integer
from tff_fedlabel.runtime._compiling import LocalPlan, RoundPlan, compile_computation
from tff_fedlabel.runtime._datasets import DatasetReader
from tff_fedlabel.runtime._errors import ComputationError, DeviceError, readable
from tff_fedlabel.runtime._graphs import Graph, flatten, unflatten
from tff_fedlabel.runtime._private_tensorflow import Call
from tff_fedlabel.runtime._types import without_placement

__all__ = ["DeviceRuntime", "find_gpus", "placement_report", "start", "validate"]

_CALLS = 32  # computations at once; further ones wait


def validate(
    *,
    max_concurrent_clients: int | None = None,
    deterministic: bool = False,
    require_gpu: bool = False,
) -> None:
    """Raises `ValueError`, in one line, where an option of `start` has a bad value."""
    if max_concurrent_clients is not None:
        check_integer("max_concurrent_clients", max_concurrent_clients, 1)
    check_flag("deterministic", deterministic)
    check_flag("require_gpu", require_gpu)


@contextlib.contextmanager
def start(
    *,
    max_concurrent_clients: int | None = None,
    deterministic: bool = False,
    require_gpu: bool = False,
) -> Iterator[DeviceRuntime]:
    """Runs computations in this process for the length of a `with` block.

    Args:
      max_concurrent_clients: How many clients are computed at once; by default two for each GPU,
        or one for each CPU core that this process may use. Fewer take less memory.
      deterministic: Turns on TensorFlow's op determinism, for the rest of the process: then runs
        on a GPU repeat themselves bit for bit too, slower. What TensorFlow refuses there is
        computed on the CPU; `_determinism` has the list.
      require_gpu: Raise `DeviceError` where no GPU is visible, or where none of the clients'
        operations ran on one.

    Yields:
      A `DeviceRuntime`.

    Raises:
      ValueError: See `validate`.
      DeviceError: `require_gpu` and no GPU is visible to TensorFlow.
    """
    validate(
        max_concurrent_clients=max_concurrent_clients,
        deterministic=deterministic,
        require_gpu=require_gpu,
    )
    gpus = find_gpus(require_gpu)
    for gpu in gpus:
        # Fails once a device is in use; then whoever used it first has chosen.
        with contextlib.suppress(RuntimeError, ValueError):
            tf.config.experimental.set_memory_growth(gpu, True)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    runtime = DeviceRuntime(max_concurrent_clients, require_gpu)
    try:
        yield runtime
    finally:
        runtime.close()


def find_gpus(required: bool = False) -> list[tf.config.PhysicalDevice]:
    """The GPUs that TensorFlow sees.

    It looks for them when a process first asks, so this should be the first to ask: it loads the
    CUDA libraries that TensorFlow would not find.

    Raises:
      DeviceError: One is required and there is none; the line says what is missing.
    """
    _cuda.load_libraries()
    gpus = tf.config.list_physical_devices("GPU")
    if required and not gpus:
        raise DeviceError(f"no GPU is visible to TensorFlow: {_cuda.why_no_gpu()}")
    return gpus


class DeviceRuntime:
    """The contexts of the runtime: `context` and `async_context`, each a normal TFF one.

    Attributes:
      devices: Names of the TensorFlow devices that clients are spread over.
      placement: "CPU", "GPU" -> operations of one client that ran there, once it was measured:
        on a machine with a GPU, with the first client; elsewhere see `measure_placement`.
      operations: The same in detail: `_private_tensorflow.Operation` -> number.
    """

    processes: tuple[int, ...] = ()

    def __init__(self, max_concurrent_clients: int | None, require_gpu: bool):
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        self.devices = tuple(device.name for device in devices)
        self.placement: collections.Counter | None = None
        self.operations: collections.Counter | None = None
        self._on_gpu = devices[0].device_type == "GPU"
        self._measures = self._on_gpu
        self._require_gpu = require_gpu
        default = 2 * len(devices) if self._on_gpu else len(os.sched_getaffinity(0))
        self._in_flight = max_concurrent_clients or max(default, len(devices))
        self._pool = concurrent.futures.ThreadPoolExecutor(self._in_flight, "tff-device")
        # A pool of their own, so that no computation waits for a thread that it holds itself.
        self._callers = concurrent.futures.ThreadPoolExecutor(_CALLS, "tff-device-caller")
        # Those that wait for the callers in asynchronous code.
        self.waiters = concurrent.futures.ThreadPoolExecutor(_CALLS, "tff-device-waiter")
        self._plans: dict[int, tuple[weakref.ref, LocalPlan | RoundPlan]] = {}
        self._compiling = threading.Lock()
        self._measuring = threading.Lock()
        self._calls: set[Call] = set()
        self._closed = False
        self._datasets = DatasetReader()
        self.context = _Context(self)
        self.async_context = _AsyncContext(self)

    def check(self) -> None:
        """Raises `ComputationError` where the runtime has ended."""
        if self._closed:
            raise ComputationError(
                "this runtime has ended: call computations inside its `with` block"
            )

    def measure_placement(self) -> None:
        """Has the next client measured; what was compiled before is compiled anew."""
        self.placement = self.operations = None
        self._measures = True
        self._plans.clear()

    def close(self) -> None:
        """Cancels what still runs, in other threads, and ends."""
        self._closed = True
        for call in list(self._calls):
            call.cancel()
        for pool in (self.waiters, self._callers, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)
        self._plans.clear()

    def run(self, comp: tff.framework.ConcreteComputation, argument, call: Call | None = None):
        """Computes `comp(argument)`; see `tff.framework.SyncContext.invoke`.

        Args:
          comp: The computation.
          argument: Its argument, or None.
          call: With it the computation can be cancelled from another thread.
        """
        self.check()
        plan = self._plan(comp)
        run = self._run_local if isinstance(plan, LocalPlan) else self._run_round
        call = call or Call()
        self._calls.add(call)
        caller = None
        try:
            caller = self._callers.submit(run, comp.type_signature, plan, argument, call)
            return caller.result()
        except BaseException as error:
            call.cancel()
            if caller is not None:
                concurrent.futures.wait([caller])
            if isinstance(error, Exception):
                self.check()
            if isinstance(error, tf.errors.CancelledError) and call.cause is not None:
                error = call.cause
            if isinstance(error, tf.errors.OpError):
                raise ComputationError(
                    f"the computation failed: {readable(error.message)}"
                ) from error
            raise error
        finally:
            self._calls.discard(call)

    def _plan(self, comp) -> LocalPlan | RoundPlan:
        plan = self._known_plan(comp)
        if plan is None:
            # Computations that are compiled already do not wait for this lock.
            with self._compiling:
                plan = self._known_plan(comp)
                if plan is None:
                    plan = compile_computation(comp)
                    if self._on_gpu and _private_tensorflow.op_determinism_is_enabled():
                        _keep_refused_on_cpu(plan)
                    forget = functools.partial(self._plans.pop, id(comp), None)
                    self._plans[id(comp)] = (weakref.ref(comp, lambda _: forget()), plan)
        return plan

    def _known_plan(self, comp) -> LocalPlan | RoundPlan | None:
        # Not keyed by the computation itself: its hash serializes all of it.
        known, plan = self._plans.get(id(comp), (lambda: None, None))
        return plan if known() is comp else None

    def _run_local(self, type_spec, plan: LocalPlan, argument, call):
        with tf.device(self.devices[0]):
            arguments = []
            if type_spec.parameter is not None:
                parameter = without_placement(type_spec.parameter)
                arguments = flatten(argument, parameter, self._datasets.as_given)
            return unflatten(plan.graph(arguments, call), without_placement(type_spec.result))

    def _run_round(self, type_spec, plan: RoundPlan, argument, call):
        server, clients = plan.split(argument)
        with tf.device(self.devices[0]):
            state = flatten(server, plan.server_type, self._datasets.as_given)
            context = plan.prepare(state, call)
            total = plan.zero([], call)
            with contextlib.closing(self._updates(plan, clients, context, call)) as updates:
                for update in updates:
                    total = plan.accumulate(total + update, call)
            results = plan.update(state + plan.report(total, call), call)
            return unflatten(results[plan.skip :], without_placement(type_spec.result))

    def _updates(self, plan, clients, context, call) -> Iterator[list[tf.Tensor]]:
        """The clients' updates in the clients' order, with a bounded number in flight."""
        waiting: collections.deque[concurrent.futures.Future] = collections.deque()
        try:
            for number, client in enumerate(clients):
                if self._measures and self.placement is None:
                    yield self._measured(plan, client, context, call)
                    continue
                if len(waiting) == self._in_flight:
                    yield waiting.popleft().result()
                device = self.devices[number % len(self.devices)]
                work = self._pool.submit(self._work, plan, client, context, device, call)
                waiting.append(work)
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            call.cancel()  # the others' work is in vain
            raise
        finally:
            for future in waiting:
                future.cancel()
            concurrent.futures.wait(waiting)

    def _work(self, plan, client, context, device, call) -> list[tf.Tensor]:
        as_told = plan.work.sets_dataset_options
        to_dataset = self._datasets.as_given if as_told else self._datasets.for_clients
        try:
            with tf.device(device):
                data = flatten(client, plan.client_type, to_dataset)
                return plan.work(data + context, call)
        except Exception as error:
            call.failed(error)
            raise

    def _measured(self, plan, client, context, call) -> list[tf.Tensor]:
        """The first client's update, with a report of where its operations ran."""
        with self._measuring:
            update, operations = _private_tensorflow.operations_by_device(
                lambda: self._work(plan, client, context, self.devices[0], call)
            )
        placement = _private_tensorflow.by_kind(operations)
        if placement.total():  # else it ran before; the next computation will tell
            report = placement_report(placement)
            logging.info("%s", report)
            if self._require_gpu and not placement["GPU"]:
                self._plans.clear()  # so that another try measures again
                raise DeviceError(f"a GPU is required, but {report}")
            self.placement, self.operations = placement, operations
        return update


def _keep_refused_on_cpu(plan: LocalPlan | RoundPlan) -> None:
    """Before the plan's graphs are imported: they are with their first call."""
    for graph in vars(plan).values():
        if isinstance(graph, Graph):
            _determinism.keep_on_cpu(graph.graph_def)


def placement_report(placement: collections.Counter) -> str:
    """One line: which share of a client's operations ran where."""
    total = sum(placement.values())
    if not total:
        return "TensorFlow did not tell where the client's operations ran"
    shares = ", ".join(
        f"{count / total:.0%} on {kind}" for kind, count in sorted(placement.items(), reverse=True)
    )
    return f"the client's {total} operations ran {shares}"


class _Context(tff.framework.SyncContext):
    def __init__(self, runtime: DeviceRuntime):
        self._runtime = runtime

    def invoke(self, comp, arg):
        return self._runtime.run(comp, arg)


class _AsyncContext(tff.framework.AsyncContext):
    def __init__(self, runtime: DeviceRuntime):
        self._runtime = runtime

    async def invoke(self, comp, arg):
        if asyncio.iscoroutine(arg):
            arg = await arg
        call = Call()
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._runtime.waiters, self._runtime.run, comp, arg, call)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.wait([work])
            work.exception()  # seen
            raise
