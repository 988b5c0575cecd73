"""Why there is no GPU, said on machines that have more and more of what one needs."""

import ctypes
import pathlib

import pytest
import tensorflow as tf

from tff_fedlabel import runtime
from tff_fedlabel.runtime import _cuda, device

NAMES = (
    "libcudart.so.12",
    "libcublas.so.12",
    "libcublasLt.so.12",
    "libcufft.so.11",
    "libcusolver.so.11",
    "libcusparse.so.12",
    "libcudnn.so.9",
)


class Driver:
    """Stands in for libcuda.so.1."""

    def __init__(self, count, code=0):
        self._count, self._code = count, code

    def cuInit(self, flags):  # noqa: N802 (its name)
        return self._code

    def cuDeviceGetCount(self, count):  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self._count
        return 0


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(driver=, nodes=, missing=, visible=)` makes one with an NVIDIA GPU, or less."""

    def make(driver=None, nodes=("nvidia0",), missing=(), visible=None):
        build = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}
        monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
        for node in nodes:
            (tmp_path / node).touch()
        monkeypatch.setattr(_cuda, "_DEVICES", (str(tmp_path / "nvidia[0-9]*"),))
        monkeypatch.setattr(_cuda, "_wheels", lambda: [])
        there = {name: object() for name in NAMES if name not in missing}
        if driver is not None:
            there["libcuda.so.1"] = driver
        asked = []

        def load(name):
            asked.append(name)
            if name not in there:
                raise OSError(f"{name}: cannot open shared object file")
            return there[name]

        monkeypatch.setattr(ctypes, "CDLL", load)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return asked

    return make


@pytest.mark.parametrize(
    "parts, words",
    [
        ({}, ["no NVIDIA driver", "libcuda.so.1"]),
        ({"driver": Driver(1), "nodes": ()}, ["no GPU", "/dev/nvidia0", "--gpus all"]),
        (
            {"driver": Driver(1), "missing": ["libcusolver.so.11", "libcudnn.so.9"]},
            ["12.5.1", "libcusolver.so.11, libcudnn.so.9:", "gpu extra"],
        ),
        ({"driver": Driver(0), "visible": ""}, ["CUDA_VISIBLE_DEVICES=''", "hides"]),
        ({"driver": Driver(0, 100), "visible": "-1"}, ["CUDA_VISIBLE_DEVICES='-1'", "hides"]),
        ({"driver": Driver(0, 803)}, ["does not start", "803", "nvidia-smi"]),
        ({"driver": Driver(1), "visible": "0"}, ["are there", "before"]),
    ],
)
def test_one_line_says_what_is_missing(machine, parts, words):
    machine(**parts)
    line = _cuda.why_no_gpu()
    assert "\n" not in line
    for word in words:
        assert word in line


def test_without_a_cuda_build(monkeypatch):
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_cuda_build": False})
    assert "without CUDA" in _cuda.why_no_gpu()
    assert _cuda.libraries() == ()


def test_the_error_of_a_required_gpu_says_so(machine):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("this machine has a GPU")
    machine(driver=Driver(1), missing=["libcublas.so.12"])
    with (
        pytest.raises(runtime.DeviceError, match=r"no GPU is visible.*but not.* libcublas.so.12:"),
        runtime.use("device", require_gpu=True),
    ):
        pass


def test_libraries_are_loaded_only_where_there_is_a_driver(machine):
    asked = machine()
    assert _cuda.load_libraries() == []
    assert asked == ["libcuda.so.1"]
    asked = machine(driver=Driver(1))
    assert _cuda.load_libraries() == []
    assert set(NAMES) <= set(asked)


def test_the_wheels_libraries_are_found(monkeypatch, tmp_path):
    """A file of the right name counts if it is a library, whichever wheel's folder it lies in."""
    real = next(
        line.split()[-1]
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
        if "libm.so" in line or "libc.so" in line
    )
    folder = tmp_path / "nvidia" / "cusolver" / "lib"
    folder.mkdir(parents=True)
    (folder / "libsolver_of_a_test.so.11").symlink_to(real)
    (folder / "libbroken_of_a_test.so.11").write_bytes(b"no library")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_cuda, "_wheels", lambda: [str(tmp_path / "nvidia")])
    assert _cuda._load_library("libsolver_of_a_test.so.11")
    assert not _cuda._load_library("libbroken_of_a_test.so.11")
    assert not _cuda._load_library("libabsent_of_a_test.so.11")


def test_names_are_those_of_this_tensorflow():
    if not tf.sysconfig.get_build_info().get("is_cuda_build"):
        pytest.skip("this TensorFlow is built without CUDA")
    major = tf.sysconfig.get_build_info()["cuda_version"].split(".")[0]
    runtime_library = {"11": "libcudart.so.11.0", "12": "libcudart.so.12"}[major]
    assert runtime_library in _cuda.libraries() and len(_cuda.libraries()) == 7


class Gpu:
    device_type = "GPU"

    def __init__(self, number):
        self.name = f"/physical_device:GPU:{number}"


def test_memory_growth_is_set_for_each_gpu_before_the_first_use(monkeypatch):
    """In the order of the calls: libraries, GPUs, growth of each, and only then their use."""
    calls = []
    gpus = [Gpu(0), Gpu(1)]
    monkeypatch.setattr(_cuda, "load_libraries", lambda: calls.append("load") or [])

    def physical(kind=None):
        calls.append(("physical", kind))
        return gpus if kind == "GPU" else []

    def logical(kind=None):
        calls.append(("logical", kind))
        return original(kind)

    def grow(gpu, enable):
        calls.append(("grow", gpu, enable))
        if gpu is gpus[0]:
            raise RuntimeError("Physical devices cannot be modified after being initialized")

    original = tf.config.list_logical_devices
    monkeypatch.setattr(tf.config, "list_physical_devices", physical)
    monkeypatch.setattr(tf.config, "list_logical_devices", logical)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", grow)
    with device.start():
        pass
    # One that is in use already, as its owner has it, stops neither the other nor the runtime.
    assert calls[:4] == [
        "load",
        ("physical", "GPU"),
        ("grow", gpus[0], True),
        ("grow", gpus[1], True),
    ]
    assert calls[4][0] == "logical"
