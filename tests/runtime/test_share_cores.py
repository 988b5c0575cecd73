"""The threads of one TensorFlow operation, in a fresh process: they are made only once."""

import subprocess
import sys

PROGRAM = """
import os
os.sched_getaffinity = lambda pid: set(range(16))
import tensorflow as tf
from tff_fedlabel.runtime import device

threads = tf.config.threading.get_intra_op_parallelism_threads
os.environ["TF_NUM_INTRAOP_THREADS"] = "2"
device.share_cores(5)
found = [threads()]
del os.environ["TF_NUM_INTRAOP_THREADS"]
for clients in (5, 100):
    device.share_cores(clients)
    found.append(threads())
tf.constant(1.0) + 1.0
device.share_cores(2)
print(*found, threads())
"""


def test_an_operation_has_its_clients_share_of_the_cores(monkeypatch):
    """16 // 5, one at least, and none after the first operation.

    Before that: nothing while the environment says it, where 0 leaves the choice to TensorFlow.
    """
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split() == "0 3 1 1".split(), done.stderr
