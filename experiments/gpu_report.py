"""The runs that `check_gpu.py` compares, each in a process of its own, and the table they make."""

import collections
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import numpy as np

_SHAPE, _CLASSES = (32, 32, 3), 10
_AUGMENTS = ("paper", "single")


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is trained; the fields are the flags of `check_gpu.py`.

    Raises:
      ValueError: There is no such model or augmentation.
    """

    model: str = "resnet18"
    width: int = 32
    strong_augment: str = "paper"
    rounds: int = 4
    clients: int = 4
    steps: int = 4
    batch_size: int = 32

    def __post_init__(self):
        models = ("cnn", "resnet18", "resnet34", "resnet50")
        for name, known in (("model", models), ("strong_augment", _AUGMENTS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
      name: What the table calls it.
      gpu: Whether it runs on the GPU, or on the device that stands in for one.
      deterministic: The runtime's option.
      built_first: Whether the process is built before the runtime is started, and so traced
        without op determinism.
      tf32: Whether float32 products may be rounded to TensorFloat-32, TensorFlow's default.
      policy: Keras' dtype policy for the model, or None.
      optional: Whether a failure is only reported and does not make the script fail.
    """

    name: str
    gpu: bool = True
    deterministic: bool = False
    built_first: bool = False
    tf32: bool = True
    policy: str | None = None
    optional: bool = False


CPU = Run("CPU", gpu=False)
GPU = Run("GPU")
REPEATS = (Run("deterministic", deterministic=True), Run("the same again", deterministic=True))
RUNS = (
    CPU,
    GPU,
    Run("without TensorFloat-32", tf32=False),
    *REPEATS,
    Run("deterministic but built before", deterministic=True, built_first=True),
    Run("mixed_float16", policy="mixed_float16", optional=True),
    Run("mixed_bfloat16", policy="mixed_bfloat16", optional=True),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gave.

    Attributes:
      facts: What `probe` wrote; `{"error": line}` of one that failed.
      initial, first, last: Weights before and after the first round, and after the last one.
    """

    facts: dict[str, Any]
    initial: Sequence[np.ndarray] = ()
    first: Sequence[np.ndarray] = ()
    last: Sequence[np.ndarray] = ()

    @property
    def error(self) -> str | None:
        return self.facts.get("error")


@dataclasses.dataclass(frozen=True)
class Report:
    """The table, and one line for each thing that went wrong."""

    text: str
    failures: list[str]


def chosen(names: Sequence[str]) -> tuple[Run, ...]:
    """The runs of these names; all of them where there is no name.

    Raises:
      ValueError: There is no such run.
    """
    known = {run.name: run for run in RUNS}
    for name in names:
        if name not in known:
            raise ValueError(f"runs must be of {', '.join(known)}, got {name!r}")
    return tuple(run for run in RUNS if not names or run.name in names)


def check(size: Size, runs: Sequence[Run], script: str, *, stand_in: bool) -> Report:
    """Does the runs, with `script` as the command that calls `probe`."""
    results = {}
    for run in runs:
        print(f"== {run.name}", file=sys.stderr, flush=True)
        results[run] = _in_process(size, run, script, stand_in)
    return report(size, results, stand_in=stand_in)


def _in_process(size: Size, run: Run, script: str, stand_in: bool) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        choices = {
            "size": dataclasses.asdict(size),
            "run": dataclasses.asdict(run),
            "stand_in": stand_in,
            "folder": folder,
        }
        environment = dict(os.environ)
        if not run.gpu:
            environment["CUDA_VISIBLE_DEVICES"] = "-1"
        done = subprocess.run(
            [sys.executable, script, "--probe", json.dumps(choices)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"]
            return Result({"error": lines[-1].removeprefix("check_gpu.py: ")})
        facts = json.loads(pathlib.Path(folder, "facts.json").read_text())
        with np.load(pathlib.Path(folder, "weights.npz")) as file:
            weights = [
                [file[name] for name in file.files if name.startswith(part)]
                for part in ("initial", "first", "last")
            ]
        return Result(facts, *weights)


def probe(choices: str) -> None:
    """Does one run, in this process, and leaves facts.json and weights.npz in its folder."""
    choices = json.loads(choices)
    size, run = Size(**choices["size"]), Run(**choices["run"])

    import tensorflow as tf

    from tff_fedlabel import runtime
    from tff_fedlabel.runtime import device

    gpus = device.find_gpus(required=run.gpu and not choices["stand_in"])
    if run.gpu and choices["stand_in"]:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * 2,
        )
    tf.config.experimental.enable_tensor_float_32_execution(run.tf32)
    process = _process(size, run.policy) if run.built_first else None
    options = {"deterministic": run.deterministic, "require_gpu": bool(run.gpu and gpus)}
    with runtime.use("device", **options) as handle:
        process = process or _process(size, run.policy)
        handle.backend.measure_placement()
        seconds, weights = _train(process, size)
        operations = handle.backend.operations or {}
        facts = {
            "seconds": seconds,
            "devices": list(handle.backend.devices),
            "operations": [[*operation, number] for operation, number in operations.items()],
            "gpus": [tf.config.experimental.get_device_details(gpu) for gpu in gpus],
        }
    folder = pathlib.Path(choices["folder"])
    np.savez(
        folder / "weights.npz",
        **{
            f"{part}_{index:04}": np.asarray(weight, np.float32)
            for part, values in weights.items()
            for index, weight in enumerate(values)
        },
    )
    (folder / "facts.json").write_text(json.dumps(facts, default=str))


def _process(size: Size, policy: str | None):
    import tensorflow as tf
    import tensorflow_federated as tff

    import tff_fedlabel
    from tff_fedlabel import augmentation, models

    augments = {"paper": augmentation.RandAugment, "single": augmentation.RandAugment.single}
    before = tf.keras.mixed_precision.global_policy()
    if policy is not None:
        tf.keras.mixed_precision.set_global_policy(policy)
    try:
        model = models.functional_model(
            models.build_keras(size.model, _SHAPE, _CLASSES, width=size.width), input_shape=_SHAPE
        )
        return tff_fedlabel.build_fedlabel(
            model,
            tff.learning.optimizers.build_sgdm(0.01),
            # All labels are kept, so that no difference in a last bit decides about one.
            tff_fedlabel.FedLabelConfig(
                threshold=0.0, strong_augment=augments[size.strong_augment]()
            ),
        )
    finally:
        tf.keras.mixed_precision.set_global_policy(before)


def _train(process, size: Size) -> tuple[list[float], dict[str, list[np.ndarray]]]:
    """Seconds of each round, and the weights at three times."""
    from tff_fedlabel.datasets import federated

    images = 2 * size.steps * size.batch_size
    rng = np.random.default_rng(0)
    data = federated.from_arrays(
        rng.integers(0, 256, (size.clients * images, *_SHAPE), dtype=np.uint8),
        rng.integers(0, _CLASSES, size.clients * images),
        np.repeat(np.arange(size.clients), images),
        np.arange(size.clients * images) % 2 == 0,
        num_classes=_CLASSES,
    )

    def weights(state):
        return [np.asarray(w) for w in process.get_model_weights(state).trainable]

    state = process.initialize()
    seconds, kept = [], {"initial": weights(state)}
    for round_num in range(size.rounds):
        cohort = [
            data.client_dataset(
                client,
                round_num,
                labeled_steps=size.steps,
                unlabeled_steps=size.steps,
                batch_size=size.batch_size,
            )
            for client in data.client_ids
        ]
        start = time.perf_counter()
        state = process.next(state, cohort).state
        kept["last"] = weights(state)  # Waits for the device, too.
        seconds.append(time.perf_counter() - start)
        kept.setdefault("first", kept["last"])
    return seconds, kept


# The table.


def report(size: Size, results: dict[Run, Result], *, stand_in: bool) -> Report:
    """The table of the runs that were done."""
    none = Result({"error": "not run"})
    cpu, gpu, one, two = (results.get(run, none) for run in (CPU, GPU, *REPEATS))
    failures = [
        f"{run.name}: {result.error}"
        for run, result in results.items()
        if result.error and not run.optional
    ]
    repeats = "not known, for there are no two"
    if not (one.error or two.error):
        same = all(np.array_equal(a, b) for a, b in zip(one.last, two.last, strict=True))
        repeats = "bit-equal" if same else f"differ by {_difference(one.last, two.last):.2g}"
        if not same:
            failures.append(f"two deterministic runs {repeats}")
    parts = [
        "# FedLabel on two logical CPU devices (no GPU)" if stand_in else "# FedLabel on a GPU",
        _markdown(("what", "value"), _facts(size, gpu, stand_in)),
        _markdown(
            (
                "run",
                "first round, s",
                "a round, s",
                "CPU / run",
                "from CPU",
                "of the step",
                "on GPU",
            ),
            [_row(run, result, cpu, stand_in) for run, result in results.items()],
        ),
        "A round: the median of those after the first. From CPU: the largest difference of a "
        "weight after one round; of the step: its share of the largest change in that round.",
        f"Two deterministic runs, each in a process of its own: {repeats}.",
    ]
    for name, result in (("", gpu), (", deterministic", one)):
        if not result.error:
            operations = [(*row[:3], row[3]) for row in result.facts["operations"]]
            parts += [
                f"## Operations of one client{name}",
                _markdown(
                    ("operation", *_PLACES, "on a GPU" if stand_in else "why not on the GPU"),
                    placement_rows(operations, stand_in=stand_in),
                ),
            ]
    return Report("\n\n".join(parts) + "\n", failures)


_PLACES = ("on GPU", "GPU, host memory", "on CPU")


def placement_rows(
    operations: Iterable[tuple[str, str, str, int]], *, stand_in: bool = False
) -> list[tuple[str, ...]]:
    """Where operations ran, a row for each type, and a last one for all.

    Args:
      operations: device ("GPU:0"), type, what TensorFlow has for it on a GPU, and number, as the
        runtime's `operations` has them.
      stand_in: There is no GPU: the last column says what TensorFlow has for one.
    """
    from tff_fedlabel.runtime import _private_tensorflow as private

    counts = collections.defaultdict(collections.Counter)
    reasons = collections.defaultdict(collections.Counter)
    for device, op, on_gpu, number in operations:
        in_host_memory = on_gpu == private.HOST_MEMORY
        if not device.startswith("GPU"):
            place = "on CPU"
            if stand_in:
                pass
            elif on_gpu == private.GPU_KERNEL:
                on_gpu = "kept by TensorFlow with what it works on"
            elif in_host_memory:
                on_gpu = "host memory by design"
            reasons[op][on_gpu] += number
        else:
            place = "GPU, host memory" if in_host_memory else "on GPU"
        counts[op][place] += number
        counts["all"][place] += number
    total = counts.pop("all", collections.Counter())
    order = sorted(counts, key=lambda op: (-counts[op]["on CPU"], -counts[op].total(), op))
    rows = [
        (
            op,
            *(str(counts[op][place] or "") for place in _PLACES),
            "; ".join(f"{reason} ({n})" for reason, n in reasons[op].most_common()),
        )
        for op in order
    ]
    return [*rows, ("all", *(str(total[place]) for place in _PLACES), "")]


def _row(run: Run, result: Result, cpu: Result, stand_in: bool) -> tuple[str, ...]:
    name = run.name
    if run.gpu and run != GPU:
        name = f"{GPU.name}, {name}"
    if stand_in:
        name = name.replace(GPU.name, "2 logical CPUs")
    if result.error:
        return (name, "failed", "", "", "", "", result.error.replace("|", "/")[:200])
    seconds = result.facts["seconds"]
    later = float(np.median(seconds[1:]))
    ratio = difference = share = ""
    if not cpu.error:
        ratio = f"{float(np.median(cpu.facts['seconds'][1:])) / later:.2f}"
        difference = _difference(result.first, cpu.first)
        share = f"{difference / max(_difference(cpu.first, cpu.initial), 1e-30):.2g}"
        difference = f"{difference:.2g}"
    numbers = collections.Counter()
    for device, _, _, number in result.facts["operations"]:
        numbers[device.split(":")[0]] += number
    on_gpu = f"{numbers['GPU']} of {numbers.total()} operations"
    return (name, f"{seconds[0]:.2f}", f"{later:.3f}", ratio, difference, share, on_gpu)


def _difference(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def _facts(size: Size, gpu: Result, stand_in: bool) -> list[tuple[str, str]]:
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    found = gpu.facts.get("gpus") or []
    names = [
        f"{details.get('device_name', 'unknown')} (compute capability "
        f"{'.'.join(map(str, details.get('compute_capability', ['unknown'])))})"
        for details in found
    ]
    return [
        ("GPU", "none: CPU devices stand in" if stand_in else ", ".join(names) or "unknown"),
        ("driver", _driver()),
        ("TensorFlow", tf.__version__),
        ("built for CUDA", str(build.get("cuda_version", "none"))),
        ("built for cuDNN", str(build.get("cudnn_version", "none"))),
        ("built for GPUs", ", ".join(build.get("cuda_compute_capabilities", ()))),
        ("TFF", metadata.version("tensorflow-federated")),
        ("Python", sys.version.split()[0]),
        ("CPU cores", str(len(os.sched_getaffinity(0)))),
        ("trained", ", ".join(f"{k} {v}" for k, v in dataclasses.asdict(size).items())),
    ]


def _driver() -> str:
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none found"
    found = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", text)
    return found.group(1) if found else "unknown"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
