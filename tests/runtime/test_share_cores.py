"""The threads of one TensorFlow operation, in fresh processes: they are made only once."""

import subprocess
import sys

import pytest

PROGRAM = """
import os
os.sched_getaffinity = lambda pid: set(range(16))
import tensorflow as tf
from tff_fedlabel.runtime import device

threads = tf.config.threading.get_intra_op_parallelism_threads
found = [threads()]
for clients in (5, 100):
    device.share_cores(clients)
    found.append(threads())
tf.constant(1.0) + 1.0
device.share_cores(2)
print(*found, threads())
"""


@pytest.mark.parametrize(
    "environment,expected",
    [
        ({}, "0 3 1 1"),  # 16 // 5, one at least, and none after the first operation
        ({"TF_NUM_INTRAOP_THREADS": "2"}, "0 0 0 0"),  # where 0 leaves the choice to TensorFlow
    ],
)
def test_an_operation_has_its_clients_share_of_the_cores(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split() == expected.split(), done.stderr
