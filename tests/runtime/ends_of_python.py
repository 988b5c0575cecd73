"""Ends Python in many ways inside a runtime, and reports what was left: see test_local_failures.py.

Importing TensorFlow takes most of the time, so one process imports it and forks a child for each
way to end early. It writes {end: {status, rest, left}} to the file named on its command line: the
exit status as `subprocess` gives it, what the child wrote after its first line up to the end of the
pipe, and which processes of the worker were left 10 seconds later. A forked TensorFlow cannot end
Python in the regular way, so that is left to this process itself.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import runtime

SIGNALS = {
    "SIGINT": signal.SIGINT,
    "SIGTERM": signal.SIGTERM,
    "SIGKILL": signal.SIGKILL,
    "forked": signal.SIGKILL,
}
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


def processor_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def observe(end, child, pipe, go):
    with os.fdopen(pipe, "rb", buffering=0) as output:
        first = output.readline().decode()
        assert first.startswith("worker "), first
        worker = int(first.split()[1])
        session = state_and_session(worker)[1]
        everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        left = [pid for pid in everyone if state_and_session(pid)[1] == session]
        assert len(left) == 3, end
        before = processor_seconds(worker)
        os.write(go, b"counted")
        if end in SIGNALS:
            deadline = time.monotonic() + SECONDS
            while processor_seconds(worker) < before + 0.2:  # It computes.
                assert time.monotonic() < deadline, f"{end}: the worker computes nothing"
                time.sleep(0.02)
            # A terminal's Ctrl-C goes to the whole group.
            (os.killpg if end == "SIGINT" else os.kill)(child, SIGNALS[end])
        rest = b""
        while end != "forked":  # whose grandchild holds the pipe on purpose
            assert select.select([output], [], [], SECONDS)[0], f"{end}: the pipe stays open"
            part = output.read(4096)
            if not part:
                break
            rest += part
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        deadline = time.monotonic() + 10
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = [pid for pid in left if state_and_session(pid)[0] not in ("gone", "Z")]
        return {"status": status, "rest": rest.decode(), "left": left}


def tell(handle):
    print("worker", *handle.processes, count(5), flush=True)


def end_early(end, going):
    with runtime.use("local") as handle:
        if end == "child_ends":
            child = os.fork()
            if child == 0:
                sys.exit()  # leaves the block, as any error would
            os.waitpid(child, 0)
        elif end == "forked" and os.fork() == 0:
            time.sleep(600)
        tell(handle)
        os.read(going, 1)  # until the worker's processes have been counted
        if end == "child_ends":
            print(count(9), flush=True)
        else:
            try:
                count(10**12)
            except KeyboardInterrupt:
                handle.check()  # Ctrl-C has not reached the worker
                print("interrupted", flush=True)
                raise


def end_regularly():
    """Uses every context, TFF's own included, and leaves one block open."""
    print("own", count(5), flush=True)  # TFF's own context: no block is open
    with runtime.use("local") as handle:
        tell(handle)
    global block
    block = runtime.use("local")
    tell(block.__enter__())
    sys.exit(3)


def main(report):
    seen = {}
    for end in (*SIGNALS, "child_ends"):
        reading, writing = os.pipe()
        going, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            os.close(reading)
            os.close(writing)
            try:
                end_early(end, going)
            except (KeyboardInterrupt, SystemExit):
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(writing)
        try:
            seen[end] = observe(end, child, reading, go)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # the grandchild of "forked", or after a failure
            os.close(going)
            os.close(go)
    with open(report, "w") as file:
        json.dump(seen, file)
    end_regularly()


if __name__ == "__main__":
    main(sys.argv[1])
