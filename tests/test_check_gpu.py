"""The table of the GPU check from made-up results, and the script where there is no GPU."""

import pathlib
import subprocess
import sys

import check_gpu
import numpy as np
import pytest
import tensorflow as tf
from scripts import run_script

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1] / "experiments"


@pytest.fixture
def gpu_report(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import gpu_report

    return gpu_report


def cells(text, start):
    """The cells of the one row that starts so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def results(gpu_report, **changed):
    """Made-up results of all runs: a step of 0.5, seconds 9 and then 1, 3, 2."""

    def result(first):
        facts = {
            "seconds": [9.0, 1.0, 3.0, 2.0],
            "devices": ["/device:GPU:0"],
            "gpus": [{"device_name": "A GPU", "compute_capability": [8, 0]}],
            "operations": [
                ["GPU:0", "Conv2D", "GPU kernel", 30],
                ["GPU:0", "Shape", "host memory", 4],
                ["CPU:0", "Shape", "host memory", 1],
                ["CPU:0", "GatherV2", "no GPU kernel for uint8", 2],
                ["CPU:0", "Cast", "GPU kernel", 3],
            ],
        }
        start = [np.zeros((2, 2)), np.zeros(3)]
        return gpu_report.Result(facts, start, [w + first for w in start], [w + 1 for w in start])

    found = {run: result(0.5) for run in gpu_report.RUNS}
    for run in found:
        if run.name in changed:
            found[run] = changed[run.name](found[run])
    return found


def test_a_good_gpu(gpu_report):
    def on_gpu(result):
        result.first[1][2] += 0.01
        result.facts["seconds"] = [5.0, 0.5, 0.2, 0.4]
        return result

    found = results(gpu_report, GPU=on_gpu)
    report = gpu_report.report(gpu_report.Size(), found, stand_in=False)
    assert not report.failures
    assert "# FedLabel on a GPU\n" in report.text and "bit-equal" in report.text
    name, *row = cells(report.text, "CPU")
    assert row[:5] == ["9.00", "2.000", "1.00", "0", "0"]
    rows = [line for line in report.text.splitlines() if line.startswith("| GPU |")]
    assert rows[0] == "| GPU | A GPU (compute capability 8.0) |"
    # median 0.4 against 2; 0.01 of a step of 0.5
    assert rows[1] == "| GPU | 5.00 | 0.400 | 5.00 | 0.01 | 0.02 | 34 of 40 operations |"


def test_repeats_that_differ_are_a_failure(gpu_report):
    def other(result):
        result.last[0][0, 1] += 2**-20
        return result

    found = results(gpu_report, **{"the same again": other})
    report = gpu_report.report(gpu_report.Size(), found, stand_in=False)
    assert report.failures == ["two deterministic runs differ by 9.5e-07"]
    assert "9.5e-07" in report.text and "bit-equal" not in report.text


def test_failed_runs(gpu_report):
    def fail(result):
        return gpu_report.Result({"error": "no kernel | at all"})

    found = results(gpu_report, deterministic=fail, mixed_float16=fail)
    report = gpu_report.report(gpu_report.Size(), found, stand_in=False)
    assert report.failures == ["deterministic: no kernel | at all"]  # the other is optional
    assert cells(report.text, "GPU, mixed_float16") == [
        "GPU, mixed_float16",
        "failed",
        *[""] * 4,
        "no kernel / at all",
    ]
    assert "there are no two" in report.text
    found = results(gpu_report, CPU=fail)
    assert cells(gpu_report.report(gpu_report.Size(), found, stand_in=False).text, "CPU")[1] == (
        "failed"
    )


def test_places_and_reasons(gpu_report):
    found = results(gpu_report)
    operations = found[gpu_report.GPU].facts["operations"]
    assert gpu_report.placement_rows(operations) == [
        ("Cast", "", "", "3", "kept by TensorFlow with what it works on (3)"),
        ("GatherV2", "", "", "2", "no GPU kernel for uint8 (2)"),
        ("Shape", "", "4", "1", "host memory by design (1)"),
        ("Conv2D", "30", "", "", ""),
        ("all", "30", "4", "6", ""),
    ]
    rows = gpu_report.placement_rows([("CPU:0", "Cast", "GPU kernel", 3)], stand_in=True)
    assert rows[0] == ("Cast", "", "", "3", "GPU kernel (3)")


def test_a_stand_in_is_called_one(gpu_report):
    found = {gpu_report.GPU: results(gpu_report)[gpu_report.GPU]}
    text = gpu_report.report(gpu_report.Size(), found, stand_in=True).text
    assert text.startswith("# FedLabel on two logical CPU devices (no GPU)\n")
    assert cells(text, "2 logical CPUs")
    assert cells(text, "GPU") == ["GPU", "none: CPU devices stand in"]


WRONG_USAGE = [
    (["--model", "cnm"], ["model", "cnm", "resnet18"]),
    (["--strong_augment", "none"], ["strong_augment", "single"]),
    (["--runs", "GPU,TPU"], ["TPU", "mixed_bfloat16"]),
    (["--rounds", "1"], ["rounds"]),
    (["--output", "/proc/nothing/gpu.md"], ["/proc/nothing/gpu.md"]),
    (["--output", str(EXPERIMENTS)], ["is a folder", "--output"]),
]


def check_one_line(code, errors, words):
    assert code == 2, errors
    assert len(errors.splitlines()) == 1, errors
    for word in words:
        assert word in errors


@pytest.mark.parametrize("flags,words", WRONG_USAGE)
def test_wrong_usage_is_one_line(flags, words):
    code, _, errors = run_script(check_gpu, check_gpu.check, *flags)
    check_one_line(code, errors, words)


def test_wrong_usage_as_a_user_sees_it():
    flags, words = WRONG_USAGE[0]
    result = subprocess.run(
        [sys.executable, check_gpu.__file__, *flags], capture_output=True, text=True, timeout=60
    )
    check_one_line(result.returncode, result.stderr, words)


@pytest.fixture
def without_gpus(monkeypatch):
    """Neither this process nor those that it starts see a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    devices = tf.config.list_physical_devices
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: [] if kind == "GPU" else devices(kind)
    )


@pytest.mark.usefixtures("without_gpus")
def test_without_a_gpu_it_says_why():
    code, output, errors = run_script(check_gpu, check_gpu.check)
    assert code == 1 and not output
    (line,) = errors.splitlines()
    assert line.startswith("check_gpu.py: no GPU is visible to TensorFlow: ")


@pytest.mark.usefixtures("without_gpus")
def test_two_cpu_devices_stand_in(tmp_path):
    path = tmp_path / "gpu.md"
    flags = "--allow_cpu --model cnn --width 2 --rounds 2 --clients 2 --steps 1 --batch_size 2"
    code, output, errors = run_script(
        check_gpu,
        check_gpu.check,
        *[*flags.split(), "--strong_augment", "single", "--runs", "GPU", "--output", path],
    )
    assert code == 0, errors
    text = path.read_text()
    assert output == text
    assert cells(text, "GPU") == ["GPU", "none: CPU devices stand in"]
    name, first, later, *_, on_gpu = cells(text, "2 logical CPUs")
    assert float(first) > 0 and float(later) > 0 and on_gpu.startswith("0 of ")
    operation, gpu, host, cpu, reason = cells(text, "ImageProjectiveTransformV3")
    assert (gpu, host, cpu, reason) == ("", "", "1", "GPU kernel (1)")
    assert cells(text, "all")[1:3] == ["0", "0"]
