"""The GPU driver and the CUDA libraries: whether TensorFlow finds them, and if not, why.

TensorFlow looks for GPUs once. If one of its libraries is missing, it goes on without a GPU and
names the library only in a log that is usually silenced.

Loading them here first also works around a bug. TensorFlow 2.21 looks for libcusolver only in the
system's folders, not where `tensorflow[and-cuda]` installs it (the search path in
libtensorflow_framework.so.2 names the folders of the other libraries), and without it uses no GPU.
A library that the process has already loaded is found by its name.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os

import tensorflow as tf

# CUDA's major version -> the libraries without which TensorFlow 2.14 to 2.21 registers no GPU,
# besides libcudnn. Observed in the loader's log with a stand-in for the driver.
_LIBRARIES = {
    "11": (
        "libcudart.so.11.0",
        "libcublas.so.11",
        "libcublasLt.so.11",
        "libcufft.so.10",
        "libcusolver.so.11",
        "libcusparse.so.11",
    ),
    "12": (
        "libcudart.so.12",
        "libcublas.so.12",
        "libcublasLt.so.12",
        "libcufft.so.11",
        "libcusolver.so.11",
        "libcusparse.so.12",
    ),
}
_DRIVER = "libcuda.so.1"
# The second is the GPU of the Windows host under WSL.
_DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg")


def libraries() -> tuple[str, ...]:
    """The CUDA libraries that this TensorFlow needs, by the names it looks them up by."""
    build = tf.sysconfig.get_build_info()
    names = _LIBRARIES.get(str(build.get("cuda_version", "")).split(".")[0], ())
    return (*names, f"libcudnn.so.{build.get('cudnn_version')}") if names else ()


def load_libraries() -> list[str]:
    """Loads TensorFlow's CUDA libraries if there is a driver; call it before TensorFlow looks.

    Returns:
      Names of those that are not installed or cannot be loaded.
    """
    if _load(_DRIVER) is None:
        return []
    return [name for name in libraries() if not _load_library(name)]


def why_no_gpu() -> str:
    """Why TensorFlow sees no GPU, in one line that says what to do."""
    build = tf.sysconfig.get_build_info()
    if not build.get("is_cuda_build"):
        return "this TensorFlow is built without CUDA: install the package tensorflow"
    driver = _load(_DRIVER)
    if driver is None:
        return f"there is no NVIDIA driver ({_DRIVER} is not found): install NVIDIA's driver"
    if not any(glob.glob(pattern) for pattern in _DEVICES):
        return (
            "the NVIDIA driver has no GPU (there is no /dev/nvidia0): in a container, pass the "
            "GPUs through, as in docker run --gpus all"
        )
    missing = load_libraries()
    if missing:
        return (
            f"the NVIDIA driver is there, but not the CUDA {build['cuda_version']} libraries "
            f"{', '.join(missing)}: install the package's gpu extra, or tensorflow[and-cuda]"
        )
    code, count = _count_gpus(driver)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not count:
        return (
            f"driver and CUDA libraries are there, but CUDA_VISIBLE_DEVICES={hidden!r} hides "
            "every GPU: unset it"
        )
    if not count:
        return f"the NVIDIA driver does not start (cuInit says {code}): nvidia-smi may show why"
    return (
        "driver and CUDA libraries are there: TensorFlow looked for GPUs before the libraries were "
        "loaded, or finds this one too old; restart Python with the device runtime first, and "
        "with TF_CPP_MIN_LOG_LEVEL=0 to see the reason"
    )


def _load(name: str):
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _load_library(name: str) -> bool:
    """Loads a library from where TensorFlow would take it; returns whether it is loaded."""
    wheels = [path for folder in _wheels() for path in glob.glob(f"{folder}/*/lib/{name}")]
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    named = any(os.path.exists(os.path.join(folder, name)) for folder in folders if folder)
    order = [name, *wheels] if named else [*wheels, name]
    return any(_load(path) is not None for path in order)


def _wheels() -> list[str]:
    """The folders that the nvidia-* wheels install into."""
    spec = importlib.util.find_spec("nvidia")
    return list(spec.submodule_search_locations or ()) if spec else []


def _count_gpus(driver) -> tuple[int, int]:
    """The driver's status code (0 is success) and the number of GPUs this process may use."""
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return code, count.value
