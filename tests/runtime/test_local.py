"""The local runtime: its answers, its contexts, and that nothing of it piles up."""

import asyncio
import contextlib
import os
import socket
import threading
import time

import numpy as np
import pytest
import tensorflow_federated as tff
from computations import mean_of_squares, square
from worker_processes import alive, eventually, within

from tff_fedlabel import runtime


def family(worker_pid):
    """The worker, its supervising shell and what else that shell started."""
    with open(f"/proc/{worker_pid}/stat") as file:
        session = int(file.read().rsplit(")", 1)[1].split()[3])
    members = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{name}/stat") as file:
                if int(file.read().rsplit(")", 1)[1].split()[3]) == session:
                    members.add(int(name))
    assert worker_pid in members
    assert len(members) == 3
    assert os.getpid() not in members
    return members


def rss_kib(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


@pytest.mark.parametrize("options", [{}, {"max_concurrent_computation_calls": 1}])
def test_results_equal_numpy(options):
    values = np.array([1.5, -2.0, 4.0, 0.25], np.float32)
    with runtime.use("local", **options) as handle:
        assert handle.name == "local"
        result = mean_of_squares(list(values))
        handle.check()
    assert result == pytest.approx(np.mean(values.astype(np.float64) ** 2), rel=1e-6)


def test_a_learning_process_runs():
    counts = tff.templates.IterativeProcess(
        initialize_fn=tff.federated_computation(lambda: tff.federated_value(0, tff.SERVER)),
        next_fn=tff.federated_computation(
            lambda state, values: tff.federated_map(
                tff.tensorflow.computation(lambda s, v: s + v),
                (state, tff.federated_sum(values)),
            ),
            [tff.FederatedType(np.int32, tff.SERVER), tff.FederatedType(np.int32, tff.CLIENTS)],
        ),
    )
    with runtime.use("local"):
        state = counts.initialize()
        for cohort in ([1, 2], [3, 4, 5], []):
            state = counts.next(state, cohort)
    assert state == 15


def test_default_number_of_clients():
    @tff.federated_computation
    def clients():
        return tff.federated_sum(tff.federated_value(1, tff.CLIENTS))

    with runtime.use("local", default_num_clients=7):
        assert clients() == 7


def test_structures_can_be_streamed():
    @tff.tensorflow.computation(tff.to_type([np.float32, np.int32]))
    def swap(pair):
        return pair[1], pair[0]

    with runtime.use("local", stream_structs=True):
        assert tuple(swap((2.5, 3))) == (3, 2.5)


def test_asynchronous_context_for_programs():
    values = np.array([3.0, 5.0], np.float32)

    async def program():
        first, second = mean_of_squares(list(values)), square(values[0])
        assert isinstance(first, tff.program.MaterializableValueReference)
        return await tff.program.materialize_value((first, second))

    with runtime.use("local", asynchronous=True) as handle:
        current = tff.framework.get_context_stack().current
        assert isinstance(current, tff.program.NativeFederatedContext)
        mean, squared = asyncio.run(program())
        # The synchronous context of the same worker is at hand too.
        with tff.framework.get_context_stack().install(handle.context):
            assert square(3.0) == 9.0
    assert mean == pytest.approx(np.mean(values.astype(np.float64) ** 2))
    assert squared == 9.0


def test_federated_context_beside_the_synchronous_one():
    with runtime.use("local") as handle:
        context = handle.federated_context()
        assert isinstance(context, tff.program.NativeFederatedContext)

        async def program():
            with tff.framework.get_context_stack().install(context):
                return await square(4.0).get_value()

        assert asyncio.run(program()) == 16.0
        assert square(5.0) == 25.0


def test_the_worker_gets_the_environment(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    with runtime.use("local") as handle:
        with open(f"/proc/{handle.processes[0]}/environ", "rb") as file:
            environment = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if entry)
    assert environment[b"TF_ENABLE_ONEDNN_OPTS"] == b"0"
    # Python's level is 3 where its own warnings are silenced; the log keeps the worker's.
    assert environment[b"TF_CPP_MIN_LOG_LEVEL"] == b"1"


def test_a_proxy_does_not_catch_the_calls(monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening: whoever asks it is refused
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with runtime.use("local"):
            assert square(3.0) == 9.0


class _Leave(Exception):
    pass


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("leave", [None, _Leave, SystemExit, KeyboardInterrupt])
def test_previous_context_is_back_and_processes_are_gone(leave, asynchronous):
    stack = tff.framework.get_context_stack()
    before = stack.current
    with pytest.raises(leave) if leave else contextlib.nullcontext():
        with runtime.use("local", asynchronous=asynchronous) as handle:
            assert stack.current is not before
            members = family(handle.processes[0])
            if leave:
                raise leave
    assert stack.current is before
    assert not [pid for pid in members if alive(pid)]


def test_blocks_after_each_other_and_nested():
    stack = tff.framework.get_context_stack()
    pids = []
    for _ in range(2):
        with runtime.use("local") as outer:
            with runtime.use("local") as inner:
                assert inner.backend.port != outer.backend.port
                assert stack.current is inner.context
                assert square(2.0) == 4.0
            assert stack.current is outer.context
            assert alive(outer.processes[0]) and not alive(inner.processes[0])
            assert square(3.0) == 9.0
        pids += [*outer.processes, *inner.processes]
    assert len(set(pids)) == 4
    assert not [pid for pid in pids if alive(pid)]


def test_two_threads_have_a_runtime_each():
    both_inside = threading.Barrier(2, timeout=60)
    answers = {}

    def work(x):
        with runtime.use("local") as handle:
            both_inside.wait()
            answers[handle.processes[0]] = (x, square(x))
            both_inside.wait()

    threads = [threading.Thread(target=work, args=(x,), daemon=True) for x in (2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(answers.values()) == [(2.0, 4.0), (3.0, 9.0)]
    assert not [pid for pid in answers if alive(pid)]


def test_nothing_piles_up_over_many_blocks():
    def held():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def use_it():
        with runtime.use("local"):
            square(1.0)

    def settled():
        """What is held once that has not changed for half a second."""
        last, now = None, held()
        while now != last:
            time.sleep(0.5)
            last, now = now, held()
        return now

    use_it()
    threads, files = settled()
    for _ in range(4):
        use_it()
    assert eventually(lambda: held()[0] <= threads), (held(), threads, files)
    assert eventually(lambda: held()[1] <= files), (held(), threads, files)


def test_a_call_after_the_block_says_so():
    with runtime.use("local") as handle:
        pass
    with tff.framework.get_context_stack().install(handle.context):
        with pytest.raises(runtime.WorkerError, match="inside its `with` block"):
            within(30, lambda: handle.context.invoke(square, 1.0))
    with pytest.raises(runtime.WorkerError, match="inside its `with` block"):
        handle.check()
    assert handle.backend.log() == ""


def test_small_calls_do_not_grow_memory():
    values = [np.float32(v) for v in range(5)]
    with runtime.use("local") as handle:
        pids = (handle.processes[0], os.getpid())
        for _ in range(50):
            mean_of_squares(values)
        before = [rss_kib(pid) for pid in pids]
        for _ in range(300):
            mean_of_squares(values)
        after = [rss_kib(pid) for pid in pids]
    assert after[0] < 1.1 * before[0], (before, after)
    assert after[1] < 1.1 * before[1], (before, after)


def test_forgotten_numbers_of_clients_are_freed():
    def threads(pid):
        return len(os.listdir(f"/proc/{pid}/task"))

    with runtime.use("local") as handle:
        for clients in range(1, 61):
            mean_of_squares([np.float32(1)] * clients)
            if clients == 20:
                before = threads(handle.processes[0])
        after = threads(handle.processes[0])
    # TFF's own factory never closes an executor: there 60 hold about 3 times what 20 hold.
    assert after < 1.7 * before, (before, after)
