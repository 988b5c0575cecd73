"""Ends Python in many ways inside a runtime, and reports what was left: see test_local.py.

Importing TensorFlow takes most of the time, so one process imports it and forks one child for each
way to end. It writes {end: {status, rest, left}} to the file named on its command line: the exit
status as `subprocess` gives it, what the child wrote after its first line up to the end of the
pipe, and which processes of the worker were left 10 seconds later. Last it ends itself.
"""

import json
import os
import select
import signal
import sys
import time

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import runtime

ENDS = ("left_open", "default_context", "error", "child_ends", "forked")
SIGNALS = ("SIGINT", "SIGTERM", "SIGKILL")
SECONDS = 60


@tff.tensorflow.computation(np.int64)
def count(limit):
    return tf.while_loop(lambda i: i < limit, lambda i: [i + 1], [tf.constant(0, tf.int64)])[0]


def state_and_session(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
            return fields[0], int(fields[3])
    except (FileNotFoundError, ProcessLookupError):
        return "gone", None


def observe(end, child, pipe):
    with os.fdopen(pipe, "rb", buffering=0) as output:
        first = output.readline().decode()
        assert first.startswith("worker "), first + output.read().decode()
        worker = int(first.split()[1])
        session = state_and_session(worker)[1]
        everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        members = [pid for pid in everyone if state_and_session(pid)[1] == session]
        if worker == 0:
            members = [pid for pid in everyone if command_names_worker(pid, child)]
        assert members, end
        time.sleep(0.5)
        if end == "SIGINT":
            os.killpg(child, signal.SIGINT)  # as a terminal does, to the whole group
        elif end in SIGNALS:
            os.kill(child, signal.Signals[end])
        elif end == "forked":
            os.kill(child, signal.SIGKILL)
        rest = b""
        while end != "forked":  # whose grandchild holds the pipe on purpose
            assert select.select([output], [], [], SECONDS)[0], f"{end}: the pipe stays open"
            part = output.read(4096)
            if not part:
                break
            rest += part
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        deadline = time.monotonic() + 10
        left = members
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = [pid for pid in left if state_and_session(pid)[0] not in ("gone", "Z")]
        if end == "forked":
            os.killpg(child, signal.SIGKILL)
        return {"status": status, "rest": rest.decode(), "left": left}


def command_names_worker(pid, parent):
    """Whether `pid` is a worker that TFF's own context in `parent` started."""
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as command:
            return int(stat.read().rsplit(")", 1)[1].split()[1]) == parent and (
                "worker_binary" in command.read()
            )
    except (FileNotFoundError, ProcessLookupError):
        return False


def tell(handle):
    print("worker", *handle.processes, count(5), flush=True)


def end_python(end):
    if end == "left_open":
        global block
        block = runtime.use("local")
        tell(block.__enter__())
    elif end == "default_context":
        # The context that importing TFF made has lost its thread in the fork.
        tff.backends.native.set_sync_local_cpp_execution_context()
        count(5)
        print("worker 0", flush=True)
    else:
        with runtime.use("local") as handle:
            if end == "child_ends":
                child = os.fork()
                if child == 0:
                    sys.exit(0)  # leaves the block and ends Python in its own way
                os.waitpid(child, 0)
            if end == "forked" and os.fork() == 0:
                time.sleep(600)
                os._exit(0)
            tell(handle)
            if end == "child_ends":
                print(count(9), flush=True)
            if end == "error":
                1 / 0
            if end == "exit":
                sys.exit(3)
            if end in SIGNALS:
                try:
                    count(10**12)
                except KeyboardInterrupt:
                    handle.check()
                    print("worker lives", flush=True)
                    raise


def main(report):
    seen = {}
    for end in (*ENDS, *SIGNALS):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            os.close(reading)
            os.close(writing)
            return end_python(end)
        os.close(writing)
        seen[end] = observe(end, child, reading)
    with open(report, "w") as file:
        json.dump(seen, file)
    return end_python("exit")


if __name__ == "__main__":
    main(sys.argv[1])
