"""Whole runs through the command line: what they leave behind, and that nothing can spoil them."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pandas as pd
import pytest

from tff_fedlabel import _compatibility, training
from tff_fedlabel.training import experiment as experiments
from tff_fedlabel.training import loop

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "experiments" / "run_tff.py"
ROUNDS = 6
SMALL = [
    *("--width", "4", "--num_clients", "6", "--clients_per_round", "3", "--tau", "2"),
    *("--tau_unlabeled", "2", "--batch_size", "8", "--eval_every", "2"),
    *("--rounds", str(ROUNDS)),
]
PLAIN = ("--strong_augment", "none")  # RandAugment takes long to compile.
LOCAL = ("--runtime", "local")


def start(output_dir, *flags):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *SMALL, *PLAIN, "--output_dir", str(output_dir), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return out, err


def wait_for(condition, process, seconds=500, every=0.002):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "the moment never came"
        time.sleep(every)


def checkpoint(output_dir, round_num=ROUNDS):
    """Every number of a checkpoint, read without the code under test."""
    import tensorflow as tf

    saved = tf.saved_model.load(str(output_dir / "checkpoints" / f"round_{round_num}"))()
    return [np.asarray(value) for value in tf.nest.flatten(saved)]


def metrics(output_dir):
    return pd.read_csv(output_dir / "metrics.csv").drop(columns="seconds")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run, its screen output included."""
    output_dir = tmp_path_factory.mktemp("runs") / "reference"
    out, err = finish(start(output_dir, *LOCAL))
    return output_dir, out, err


def test_what_a_run_leaves_behind(reference):
    output_dir, out, err = reference
    summary = json.loads((output_dir / "summary.json").read_text())
    assert summary["task"] == "digits" and summary["algorithm"] == "fedlabel"
    assert summary["rounds"] == ROUNDS and summary["runtime"] == "local"
    assert summary["seconds_per_round"] > 0
    config = json.loads((output_dir / "config.json").read_text())
    assert config["tau"] == 2 and config["versions"]["tensorflow-federated"] == "0.87.0"
    assert config["runtimes"] == [{"from_round": 0, "runtime": "local"}]

    table = pd.read_csv(output_dir / "metrics.csv")
    assert list(table["round"]) == list(range(1, ROUNDS + 1))
    assert list(table["test_accuracy"].notna()) == [False, True] * (ROUNDS // 2)
    for name in ("kept_fraction", "local_fraction", "agreement_fraction", "pseudo_label_accuracy"):
        assert table[name].between(0, 1).all()
    # 3 clients, 2 labelled batches of 8, and what passed of 2 unlabelled ones.
    expected = 48 + np.round(48 * table["kept_fraction"])
    np.testing.assert_allclose(table["images_used"], expected)
    assert table["test_accuracy"].iloc[-1] == pytest.approx(summary["test_accuracy"])
    assert list(output_dir.glob("tensorboard/*tfevents*"))
    assert "finished" in (output_dir / "run.log").read_text()
    assert f"{summary['test_accuracy']:.4f}" in out and str(output_dir) in out
    assert f"round {ROUNDS}/{ROUNDS}: accuracy" in err


# TensorFlow 2.18 to 2.20 tell of every graph that TFF compiles, and heed no setting.
_HEEDS_NO_SETTING = re.compile(
    r"I\d{4} .*(devices|single_machine|mlir_\w+)\.cc|WARNING: All log mess"
)


def test_output_is_only_ours(reference):
    """No noise of TensorFlow, keras or the worker reaches the screen."""
    _, out, err = reference
    lines = err.splitlines()
    if (2, 18) <= _compatibility.tensorflow_version() < (2, 21):
        lines = [line for line in lines if not _HEEDS_NO_SETTING.match(line)]
    assert all(line.startswith("round ") for line in lines), err
    assert len(out.splitlines()) == 11, out
    assert [line.split() for line in out.splitlines()][4] == ["runtime", "local"]


def test_evaluation_agrees_with_numpy(reference):
    """The reported test accuracy, from the checkpoint, by a convolution written out in NumPy."""
    from tff_fedlabel.datasets import sources

    output_dir = reference[0]
    arrays = checkpoint(output_dir)
    kernels = {a.shape: a for a in arrays if a.ndim > 1}
    biases = {}
    for kernel in kernels.values():
        index = next(i for i, a in enumerate(arrays) if a is kernel)
        biases[kernel.shape] = arrays[index + 1]
    conv = sorted((s for s in kernels if len(s) == 4), key=lambda s: s[2])
    dense = sorted((s for s in kernels if len(s) == 2), key=lambda s: -s[1])
    test = sources.load("digits", seed=0).test
    x = test.x / 255.0
    for shape in conv:  # 3x3, stride 2; on an even side "same" pads after the image only
        padded = np.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])
        height, width = x.shape[1:3]
        y = sum(
            padded[:, i : i + height : 2, j : j + width : 2] @ kernels[shape][i, j]
            for i in range(3)
            for j in range(3)
        )
        x = np.maximum(y + biases[shape], 0)
    hidden = np.maximum(x.reshape(len(x), -1) @ kernels[dense[0]] + biases[dense[0]], 0)
    logits = hidden @ kernels[dense[1]] + biases[dense[1]]
    accuracy = np.mean(np.argmax(logits, axis=1) == test.y)
    reported = json.loads((output_dir / "summary.json").read_text())["test_accuracy"]
    assert accuracy == pytest.approx(reported, abs=1e-6)


@pytest.fixture
def interrupted_round(monkeypatch):
    """SIGINT comes a moment after the last round has begun."""
    cohort = experiments.Experiment.cohort

    def and_interrupt(experiment, round_num, memory):
        if round_num == ROUNDS - 1:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
        return cohort(experiment, round_num, memory)

    # One that comes too late fails the test, not the process.
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(experiments.Experiment, "cohort", and_interrupt)
        yield patch
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("shared_worker")
def test_stopped_anywhere_and_resumed_ends_in_the_same_weights(
    reference, tmp_path, main, capfd, interrupted_round
):
    """Before the first round, by SIGKILL while a checkpoint is written, by SIGINT in a round."""
    output_dir = tmp_path / "run"
    output_dir.mkdir()
    shutil.copy(reference[0] / "config.json", output_dir)
    (output_dir / ".config.partial-1.json").write_text("{")
    checkpoints = output_dir / "checkpoints"

    process = start(output_dir, "--resume")
    wait_for(checkpoints.exists, process, every=0.1)
    wait_for(lambda: any(checkpoints.glob("round_[2-4]_temp*")), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()

    # What is not said again is as it was.
    continued = ("--resume", "--output_dir", str(output_dir))
    assert main(*continued, "--checkpoint_every", "1000") == 130
    assert f"--resume --output_dir {output_dir} continues the run" in capfd.readouterr().err
    done = max(int(p.name[6:]) for p in checkpoints.glob("round_*") if "temp" not in p.name)
    assert done == ROUNDS - 1

    interrupted_round.undo()
    assert main(*continued, "--noclient_accuracy") == 0
    # A rounding error apart at most: unlike `device`, the worker's TensorFlow 2.14 does not promise
    # equal bits, and under load has differed in the last of them. test_small_methods.py compares
    # bits, in `device`.
    for actual, expected in zip(checkpoint(output_dir), checkpoint(reference[0]), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    pd.testing.assert_frame_equal(metrics(output_dir), metrics(reference[0]))
    assert not list(checkpoints.glob("*_temp*"))
    assert not list(output_dir.glob(".*"))


def test_finished_run_returns_at_once(reference, main, capfd):
    before = {p: p.stat().st_mtime_ns for p in reference[0].rglob("*") if p.is_file()}
    assert main(*SMALL, *PLAIN, "--output_dir", str(reference[0]), "--resume") == 0
    assert "test accuracy" in capfd.readouterr().out
    changed = {p.name for p in before if p.stat().st_mtime_ns != before[p]}
    assert changed <= {"config.json"}


@pytest.fixture
def copy(reference, tmp_path):
    """The reference run without its summary, and its configuration."""
    output_dir = tmp_path / "run"
    shutil.copytree(reference[0], output_dir)
    (output_dir / "summary.json").unlink()
    choices = dict(zip((name[2:] for name in SMALL[::2]), map(int, SMALL[1::2]), strict=True))
    return output_dir, training.make_config("digits", strong_augment="none", **choices)


def goes_on(config, rounds):
    """To so many rounds, and without what comes after the last one."""
    return dataclasses.replace(config, rounds=rounds, client_accuracy=False)


def test_two_processes_cannot_share_a_run(copy):
    output_dir, config = copy
    descriptor = os.open(output_dir, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(training.RunDirectoryError, match="another process"):
        training.run(config, output_dir, resume=True)
    os.close(descriptor)


def test_another_run_is_refused(copy):
    output_dir, config = copy
    before = (output_dir / "config.json").read_text()
    with pytest.raises(training.RunDirectoryError, match="already holds a run; pass --resume"):
        training.run(config, output_dir)
    other = dataclasses.replace(config, lr=0.5)
    with pytest.raises(training.RunDirectoryError, match=r"lr is 0\.05 there and 0\.5 here"):
        training.run(other, output_dir, resume=True)
    assert (output_dir / "config.json").read_text() == before
    (output_dir / "config.json").unlink()
    with pytest.raises(training.RunDirectoryError, match="not empty and holds no run"):
        training.run(config, output_dir, resume=True)


@pytest.mark.usefixtures("shared_worker")
def test_damaged_checkpoint_is_named(copy):
    output_dir, config = copy
    for path in (output_dir / "checkpoints" / f"round_{ROUNDS}").rglob("variables.data*"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(training.CheckpointError, match=f"^checkpoint {ROUNDS} .* delete it"):
        training.run(config, output_dir, resume=True)
    # As the message says: without it, the previous one is good.
    shutil.rmtree(output_dir / "checkpoints" / f"round_{ROUNDS}")
    training.run(goes_on(config, ROUNDS), output_dir, resume=True)
    assert (output_dir / "summary.json").exists()


@pytest.mark.usefixtures("shared_worker")
def test_run_that_lost_only_its_summary_is_completed(copy, reference):
    output_dir, config = copy
    training.run(config, output_dir, resume=True)
    expected = json.loads((reference[0] / "summary.json").read_text())
    assert json.loads((output_dir / "summary.json").read_text()) == expected


@pytest.mark.usefixtures("build_once")
def test_longer_run_continues_a_finished_one_in_another_runtime(copy):
    output_dir, config = copy
    longer = goes_on(config, ROUNDS + 2)
    options = {"max_concurrent_clients": 2}
    summary = training.run(
        longer, output_dir, resume=True, runtime="device", runtime_options=options
    )
    assert summary["rounds"] == ROUNDS + 2 and summary["runtime"] == "device"
    table = pd.read_csv(output_dir / "metrics.csv")
    assert list(table["round"]) == list(range(1, ROUNDS + 3))
    assert json.loads((output_dir / "config.json").read_text())["runtimes"] == [
        {"from_round": 0, "runtime": "local"},
        {"from_round": ROUNDS, "runtime": "device", "options": options},
    ]
    assert training.stored_runtime(output_dir) == ("device", options)
    resumed = f"resumed at round {ROUNDS} of {ROUNDS + 2}, runtime device (before: local)"
    assert resumed in (output_dir / "run.log").read_text()


@pytest.mark.usefixtures("shared_worker")
def test_a_goal_below_what_is_done_is_refused(copy):
    output_dir, config = copy
    before = (output_dir / "config.json").read_text()
    with pytest.raises(training.RunDirectoryError, match=f"has done {ROUNDS} rounds"):
        training.run(dataclasses.replace(config, rounds=2), output_dir, resume=True)
    assert (output_dir / "config.json").read_text() == before
    assert not (output_dir / "summary.json").exists()


@pytest.mark.usefixtures("shared_worker")
@pytest.mark.parametrize(
    "choices,words",
    [({"num_clients": 5000}, "num_clients"), ({"split": "official"}, "no published test set")],
)
def test_choices_that_do_not_fit_the_data_leave_nothing_behind(tmp_path, choices, words):
    output_dir = tmp_path / "run"
    for _ in range(2):  # A second try meets no lock and no remains.
        with pytest.raises(training.ConfigError, match=words):
            training.run(training.make_config("digits", **choices), output_dir, runtime="local")
        assert not output_dir.exists()


@pytest.mark.usefixtures("build_once")
def test_worker_that_dies_costs_no_finished_round(copy, monkeypatch):
    """The round is lost, the ones before are in a checkpoint, the error names the worker."""
    from tff_fedlabel import runtime

    output_dir, config = copy
    longer = goes_on(config, ROUNDS + 5)
    kept = {}
    use = runtime.use

    @contextlib.contextmanager
    def watched(name, **options):
        with use(name, **options) as handle:
            kept["processes"] = handle.processes
            yield handle

    def kill_after_two(done, _):
        if done == ROUNDS + 2:
            for pid in kept["processes"]:
                os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(loop.runtimes, "use", watched)
    with pytest.raises(runtime.WorkerError):
        training.run(
            longer, output_dir, resume=True, checkpoint_every=1000, on_round=kill_after_two
        )
    assert (output_dir / "checkpoints" / f"round_{ROUNDS + 2}").exists()
