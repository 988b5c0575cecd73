"""The local runtime: workers that fail, and that no process is left however Python ends."""

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from computations import count_slowly, square
from worker_processes import alive, running, within

from tff_fedlabel import runtime


def fake_worker(folder, script):
    path = folder / "fake_worker.sh"
    path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("echo 'no such port: 7' >&2; exit 3", "exit status 3; its last output: no such port: 7"),
        ("echo one; echo; echo two; exit 0", r"exit status 0; its last output: one \| two$"),
        ("kill -ILL $$", r"killed by SIGILL \(this processor .*; it wrote nothing"),
        ("kill -KILL $$", r"killed by SIGKILL \(the kernel .* memory"),
        (
            "exec /no/such/loader",
            "the program cannot be run on this machine; its last output: .*loader",
        ),
    ],
)
def test_a_worker_that_dies_at_start(tmp_path, script, cause):
    started = time.monotonic()
    with pytest.raises(runtime.WorkerError, match=f"died at start-up: {cause}") as caught:
        with runtime.use("local", worker_binary=fake_worker(tmp_path, script)):
            pytest.fail("entered the block")
    assert time.monotonic() - started < 10
    assert "\n" not in str(caught.value)


def test_a_program_for_another_machine(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"\x7fELF" + bytes(60))
    foreign.chmod(0o755)
    with pytest.raises(runtime.WorkerError, match="cannot be run on this machine"):
        with runtime.use("local", worker_binary=foreign):
            pytest.fail("entered the block")


LISTENS = f"""
exec {sys.executable} -c '
import socket, sys, time
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind(("", int(sys.argv[1].split("=")[1])))
s.listen()
print("listening", flush=True)
time.sleep(600)' "$@"
"""


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (
            "echo thinking; exec sleep 600",
            "runs but does not listen on its port; its last output: thinking",
        ),
        (LISTENS, "listens on its port but does not answer; its last output: listening"),
    ],
)
def test_a_worker_that_never_gets_ready(tmp_path, script, cause):
    binary = fake_worker(tmp_path, f"echo $$ >{tmp_path}/pid\n{script}")
    started = time.monotonic()
    with pytest.raises(runtime.WorkerError, match=f"not ready after 1.5 s: it {cause}"):
        with runtime.use("local", worker_binary=binary, startup_timeout=1.5):
            pytest.fail("entered the block")
    assert time.monotonic() - started < 8
    assert not alive(int((tmp_path / "pid").read_text()))


def test_the_log_file_keeps_what_was_in_it(tmp_path):
    log = tmp_path / "worker.log"
    log.write_text("an older run\n")
    binary = fake_worker(tmp_path, "echo out; echo err >&2; exit 1")
    with pytest.raises(runtime.WorkerError, match=r"last output: out \| err$"):
        with runtime.use("local", worker_binary=binary, log_file=log):
            pytest.fail("entered the block")
    assert log.read_text() == "an older run\nout\nerr\n"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_worker_killed_in_the_middle(asynchronous):
    def compute():
        with runtime.use("local", asynchronous=asynchronous) as handle:
            killer = threading.Timer(1.0, os.kill, (handle.processes[0], signal.SIGKILL))
            killer.start()

            async def program():
                return await count_slowly(10**12).get_value()

            with pytest.raises(runtime.WorkerError, match="died: killed by SIGKILL") as caught:
                asyncio.run(program()) if asynchronous else count_slowly(10**12)
            assert "\n" not in str(caught.value)
            with pytest.raises(runtime.WorkerError, match="killed by SIGKILL"):
                handle.check()
            if not asynchronous:  # a later call fails too, at once
                with pytest.raises(runtime.WorkerError, match="killed by SIGKILL"):
                    square(1.0)

    within(60, compute)


def test_a_failing_computation_is_not_the_workers_fault():
    @tff.tensorflow.computation(np.float32)
    def refuse(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 0.0, message="too large")]):
            return tf.identity(x)

    @tff.tensorflow.computation
    def read_unset_variable():
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="unset")
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

    def compute():
        with runtime.use("local") as handle:
            with pytest.raises(runtime.ComputationError, match="too large"):
                refuse(1.0)
            with pytest.raises(runtime.ComputationError, match="variable unset"):
                read_unset_variable()
            handle.check()
            assert square(3.0) == 9.0

    within(60, compute)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """What `ends_of_python.py`, run in a pipe, saw of Python processes that ended."""
    report = tmp_path_factory.mktemp("ends") / "report.json"
    script = os.path.join(os.path.dirname(__file__), "ends_of_python.py")
    package = os.path.dirname(os.path.dirname(os.path.dirname(runtime.__file__)))
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@" 2>&1 | cat', "sh", sys.executable, script, report],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": package},
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
    )
    assert report.exists(), done.stdout
    return {**json.loads(report.read_text()), "piped": done.stdout}


def test_a_pipe_returns_and_shows_nothing_but_the_scripts_output(ends):
    """Also with a block left open, and after calls outside every block, in TFF's own context."""
    lines = [line for line in ends["piped"].splitlines() if "TFF ExecutorService" not in line]
    assert re.fullmatch(r"own 5,worker \d+ 5,worker \d+ 5", ",".join(lines)), ends["piped"]
    for pid in re.findall(r"worker (\d+)", ends["piped"]):
        assert not running(int(pid))


@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_signals_in_the_middle_of_a_computation_leave_nothing(ends, end):
    # The program may still compute while it ends: a terminal's Ctrl-C does not reach the worker.
    expected = (0, "interrupted\n") if end == "SIGINT" else (-signal.Signals[end], "")
    assert (ends[end]["status"], ends[end]["rest"]) == expected
    assert ends[end]["left"] == []


def test_a_forked_child_does_not_keep_the_worker(ends):
    assert ends["forked"]["status"] == -signal.SIGKILL
    assert ends["forked"]["left"] == []


def test_a_forked_child_that_ends_does_not_take_the_worker_along(ends):
    assert ends["child_ends"] == {"status": 0, "rest": "9\n", "left": []}
