"""Where the device runtime computes: GPUs, several devices, and what is counted where."""

import collections
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from device_rounds import assert_same, build_ours, rounds

import tff_fedlabel
from tff_fedlabel import augmentation, models, runtime
from tff_fedlabel.datasets import federated
from tff_fedlabel.runtime import _private_tensorflow, device


def test_no_gpu_is_an_error_where_one_is_required():
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("this machine has a GPU")
    with (
        pytest.raises(runtime.DeviceError, match="no GPU is visible"),
        runtime.use("device", require_gpu=True),
    ):
        pass


def test_placement_report():
    counts = collections.Counter(GPU=30, CPU=10)
    assert "75% on GPU, 25% on CPU" in device.placement_report(counts)


def test_the_next_client_is_measured_where_that_is_asked_for(clients):
    process = build_ours("fedavg")
    with runtime.device.start() as backend:
        expected, _ = rounds(backend, process, clients, 1)
        assert backend.placement is None and backend.operations is None
        backend.measure_placement()
        found, _ = rounds(backend, process, clients, 1)
        assert_same(found, expected, rtol=0)
        operations = backend.operations
        assert {operation.device for operation in operations} == {"CPU:0"}
        assert all(number > 0 for number in operations.values())
        assert backend.placement == {"CPU": sum(operations.values())}
        types = {operation.op for operation in operations}
        assert "AnonymousIteratorV3" in types and any("MatMul" in op for op in types)
        assert not {"Const", "Identity", "_Arg", "_Retval"} & types


def test_operations_are_counted_by_place_and_type(here):
    """Against the graph of a function whose operations nothing rewrites."""

    @tf.function
    def function(x):
        words = tf.strings.unicode_encode(tf.cast(x, tf.int32)[None], "UTF-8")
        return tf.linalg.det(tf.linalg.inv(tf.reshape(x, [2, 2]))), words

    _, counts = _private_tensorflow.operations_by_device(
        lambda: function(tf.constant([1.0, 2.0, 3.0, 4.0]))
    )
    of_type = {operation.op: (operation, number) for operation, number in counts.items()}
    assert of_type["MatrixInverse"][1] == of_type["MatrixDeterminant"][1] == 1
    assert of_type["MatrixInverse"][0] == ("CPU:0", "MatrixInverse", "GPU kernel")
    assert of_type["UnicodeEncode"][0] == ("CPU:0", "UnicodeEncode", "no GPU kernel")
    assert _private_tensorflow.by_kind(counts) == {"CPU": sum(counts.values())}
    _, counts = _private_tensorflow.operations_by_device(
        lambda: function(tf.constant([1.0, 2.0, 3.0, 4.0]))
    )
    assert not counts  # it ran before


def test_a_required_gpu_without_the_clients_operations_is_an_error(clients):
    process = build_ours("fedavg")
    with runtime.device.start() as backend:
        backend.measure_placement()
        backend._require_gpu = True
        for _ in range(2):
            with pytest.raises(runtime.DeviceError, match="a GPU is required, .* 100% on CPU"):
                rounds(backend, process, clients, 1)


def cnn_and_cohort():
    """A FedLabel process of the CNN, and clients with fixed images."""
    rng = np.random.default_rng(0)
    data = federated.from_arrays(
        rng.integers(256, size=(60, 8, 8, 1), dtype=np.uint8).astype(np.uint8),
        rng.integers(10, size=60).astype(np.int32),
        np.arange(60) % 3,
        np.arange(60) % 2 == 0,
        num_classes=10,
    )
    process = tff_fedlabel.build_fedlabel(
        models.functional_model(
            lambda: models.build_keras("cnn", input_shape=(8, 8, 1), num_classes=10, seed=0),
            input_shape=(8, 8, 1),
        ),
        tff.learning.optimizers.build_sgdm(0.05),
        tff_fedlabel.FedLabelConfig(threshold=0.1, strong_augment=augmentation.WeakAugment()),
    )
    cohort = [
        data.client_dataset(i, 0, labeled_steps=2, unlabeled_steps=2, batch_size=8)
        for i in data.client_ids
    ]
    return process, cohort


_SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
import numpy as np
from device_rounds import build_ours, rounds
from linear_model import random_client, to_tff
from test_device_placement import cnn_and_cohort
from tff_fedlabel import runtime
process, cohort = cnn_and_cohort()
weights = []
for name in ("device", "local"):
    with runtime.use(name):
        state = process.next(process.initialize(), cohort).state
        weights.append(process.get_model_weights(state).trainable)
for a, b in zip(*weights, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
with runtime.device.start() as backend:
    assert len(backend.devices) == 2, backend.devices
    process = build_ours("fedavg")
    clients = [to_tff(random_client(seed)) for seed in range(5)]
    weights, _ = rounds(backend, process, clients, 2)
    np.savez(sys.argv[1], *weights.trainable)

# A process that was built before op determinism was on, on "GPUs" that are CPU:1 alone: what
# TensorFlow refuses there goes to CPU:0.
from tff_fedlabel.runtime import _private_tensorflow
count = _private_tensorflow.operations_by_device
process = build_ours("fedlabel")
with runtime.device.start() as backend:
    (before, _), operations = count(lambda: rounds(backend, process, clients, 2))
    # Each client's graph was run on both.
    devices = {{o.device for o in operations if "MatMul" in o.op}}
    assert devices == {{"CPU:0", "CPU:1"}}, operations
with runtime.device.start(deterministic=True) as backend:
    backend._rounds.devices, backend._on_gpu = backend.devices[1:], True
    (after, _), operations = count(lambda: rounds(backend, process, clients, 2))
    refused = "SparseSoftmaxCrossEntropyWithLogits"
    assert {{o.device for o in operations if o.op == refused}} == {{"CPU:0"}}, operations
    assert {{o.device for o in operations if "MatMul" in o.op}} == {{"CPU:1"}}, operations
for a, b in zip(before.trainable, after.trainable, strict=True):
    np.testing.assert_array_equal(a, b)
print("done")
"""


def test_cnn_round_and_several_devices(here, clients, tmp_path):
    """In a process of its own: two logical CPU devices, and oneDNN off in both runtimes."""
    tests = os.path.dirname(__file__)
    root = os.path.dirname(os.path.dirname(tests))
    paths = [root, tests, os.path.join(tests, os.pardir, "algorithms")]
    output = tmp_path / "output"
    with open(output, "w") as file:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT.format(paths=paths), tmp_path / "weights.npz"],
            env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
    assert done.returncode == 0 and "done" in output.read_text(), output.read_text()[-3000:]
    expected, _ = rounds(here, build_ours("fedavg"), clients, 2)
    found = np.load(tmp_path / "weights.npz")
    for name, weight in zip(found.files, expected.trainable, strict=True):
        np.testing.assert_allclose(found[name], weight, rtol=1e-5, atol=1e-6)
