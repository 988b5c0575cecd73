"""Workers that tests start, and how to wait for things to happen."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

from tff_fedlabel.runtime import _worker


def within(seconds, function):
    """The result of `function`, which must end in time: a hang fails the test."""
    outcome = []

    def run():
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"still running after {seconds} s"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.02)
    return condition()


def running(pid):
    """Whether a process of this id runs; a zombie, left to process 1, does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def alive(pid):
    """Whether a process of this id runs or waits as a zombie."""
    return os.path.exists(f"/proc/{pid}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "tff_fedlabel.runtime.workers", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


@contextlib.contextmanager
def one_worker(port=0):
    worker = _worker.Worker(port=port)
    try:
        worker.wait_until_ready(30)
        yield worker
    finally:
        worker.close()


def address(port):
    return f"127.0.0.1:{port}"
