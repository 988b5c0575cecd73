"""The command that runs a worker for others, and who reaches a worker."""

import contextlib
import signal
import socket

import numpy as np
import pytest
import tensorflow_federated as tff
from scripts import run_main
from worker_processes import address, children, eventually, free_port, one_worker, running, serve

from tff_fedlabel import runtime
from tff_fedlabel.runtime import _exposure, _serve, _worker


@pytest.fixture(scope="module")
def served():
    """The port of a worker that the command `serve` runs."""
    port = free_port()
    process = serve(f"--port={port}")
    try:
        assert process.stdout.readline() == f"worker ready on 127.0.0.1:{port}\n"
        (shell,) = children(process.pid)
        family = [shell, *children(shell)]
        assert len(family) == 3
        yield port
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=30)
        assert (process.returncode, *rest) == (143, "", "")
        assert eventually(lambda: not any(map(running, family)))
    finally:
        process.kill()
        process.communicate()


def test_a_round_on_the_worker_of_the_command(served):
    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def total(values):
        return tff.federated_sum(values)

    with one_worker() as other:
        addresses = [address(served), address(other.port)]
        with runtime.use("workers", addresses=addresses) as handle:
            assert total([1, 2, 3, 4]) == 10
            assert handle.backend.lost == {}


@pytest.fixture(scope="module")
def taken():
    """A port that another program listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "the command is: serve --port PORT"),
        (["sreve"], 2, "no command 'sreve'"),
        (["serve"], 2, "--port is required"),
        (["serve", "--port=x"], 2, "--port=x"),
        (["serve", "--port=0"], 2, "--port 0 is not between"),
        (["serve", "--port=70000"], 2, "--port 70000 is not between"),
        (["serve", "--port=80", "--hots=1"], 2, "Unknown command line flag 'hots'"),
        (["serve", "--port=80", "--host=here"], 2, "--host 'here' is not an IP address"),
        (["serve", "--port=80", "--host=203.0.113.9"], 2, "is not an address of this machine: "),
        (["serve", "--port=80", "--max_concurrent_computation_calls=-1"], 2, "-1 is below 0"),
        (["serve", "--port=80", "--log_file=/no/such/log"], 2, "log_file '/no/such/log'"),
        (["serve", "extra", "--port=80"], 2, "unexpected argument 'extra'"),
        (["serve", "--port={taken}"], 1, "port {taken} is not available: it is in use"),
    ],
)
def test_usage_errors_are_one_line(arguments, code, text, taken, monkeypatch):
    handlers = []  # The last of them gets as far as this.
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append(number))
    arguments = [argument.format(taken=taken) for argument in arguments]
    actual, out, err = run_main(_serve.main, "workers.py", *arguments)
    assert (actual, out) == (code, ""), err
    assert err.startswith("workers.py: ") and err.count("\n") == 1, err
    assert text.format(taken=taken) in err
    assert handlers == [signal.SIGTERM] * (code == 1)


def reaches(host, port, seconds=0.5):
    try:
        socket.create_connection((host, port), seconds).close()
        return True
    except OSError:
        return False


def test_only_loopback_reaches_the_workers(served, local_runtime):
    others = [a for a in _exposure.local_addresses() if a not in _exposure.LOOPBACK]
    for port in (local_runtime.backend.port, served):
        assert reaches("127.0.0.1", port)
        for other in others:
            assert not reaches(other, port), other


def test_a_guard_closes_all_addresses_but_those_left_open(monkeypatch):
    """127.0.0.2 to 4 stand in for addresses of the network; new ones come up later."""
    ours = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    monkeypatch.setattr(_exposure, "_addresses", lambda: iter(ours))
    with one_worker() as worker:
        assert reaches("127.0.0.1", worker.port)
        assert not reaches("127.0.0.2", worker.port)
        assert not reaches("127.0.0.3", worker.port)
        assert reaches("127.0.0.4", worker.port)
        ours.append("127.0.0.4")
        assert eventually(lambda: worker.check() or not reaches("127.0.0.4", worker.port))
    with contextlib.closing(_worker.Worker(open_to=("127.0.0.3",))) as worker:
        worker.wait_until_ready(30)
        assert not reaches("127.0.0.2", worker.port)
        assert reaches("127.0.0.3", worker.port)
    with contextlib.closing(_worker.Worker(open_to=("0.0.0.0",))) as worker:
        worker.wait_until_ready(30)
        assert reaches("127.0.0.2", worker.port)


def test_a_guard_without_the_kernels_filter(monkeypatch):
    monkeypatch.setattr(_exposure, "_addresses", lambda: iter(["127.0.0.2"]))
    monkeypatch.setattr(_exposure, "_SO_ATTACH_FILTER", -1)
    with one_worker() as worker:
        with socket.create_connection(("127.0.0.2", worker.port), 1) as connection:
            connection.settimeout(1)
            with pytest.raises(TimeoutError):  # TFF's worker would greet
                connection.recv(1)
        with socket.create_connection(("127.0.0.1", worker.port), 1) as connection:
            connection.settimeout(5)
            assert connection.recv(1)


def test_a_port_in_use_is_refused():
    with one_worker() as worker:
        with pytest.raises(runtime.WorkerError, match=f"port {worker.port} .*: it is in use"):
            _worker.Worker(port=worker.port)
