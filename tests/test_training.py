"""Whole runs through the command line: what they leave behind, and that nothing can spoil them."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "experiments" / "run_tff.py"
ROUNDS = 6
SMALL = [
    *("--width", "4", "--num_clients", "6", "--clients_per_round", "3", "--tau", "2"),
    *("--tau_unlabeled", "2", "--batch_size", "8", "--eval_every", "2"),
    *("--rounds", str(ROUNDS)),
]


def start(output_dir, *flags, small=SMALL):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *small, "--output_dir", str(output_dir), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, code=0):
    out, err = process.communicate(timeout=500)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out, err


def wait_for(condition, process, seconds=500):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "the moment never came"
        time.sleep(0.002)


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
    out, err = finish(start(output_dir))
    return output_dir, out, err


def test_what_a_run_leaves_behind(reference):
    output_dir, out, err = reference
    summary = json.loads((output_dir / "summary.json").read_text())
    assert summary["task"] == "digits" and summary["algorithm"] == "fedlabel"
    assert summary["rounds"] == ROUNDS and summary["runtime"] == "local"
    assert summary["seconds_per_round"] > 0
    config = json.loads((output_dir / "config.json").read_text())
    assert config["tau"] == 2 and config["versions"]["tensorflow-federated"] == "0.87.0"

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


def test_output_is_only_ours(reference):
    """No noise of TensorFlow, keras or the worker reaches the screen."""
    _, out, err = reference
    assert all(line.startswith("round ") for line in err.splitlines()), err
    assert len(out.splitlines()) == 9, out


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


def test_stopped_anywhere_and_resumed_ends_in_the_same_weights(reference, tmp_path):
    """SIGKILL before the first round and while a checkpoint is written, SIGINT between rounds."""
    output_dir = tmp_path / "run"
    checkpoints = output_dir / "checkpoints"

    def rows():
        path = output_dir / "metrics.csv"
        return len(path.read_text().splitlines()) - 1 if path.exists() else 0

    for moment in (
        lambda: (output_dir / "config.json").exists(),
        lambda: any(checkpoints.glob("round_[2-5]_temp*")),
    ):
        process = start(output_dir, "--resume")
        wait_for(moment, process)
        process.send_signal(signal.SIGKILL)
        process.wait()

    process = start(output_dir, "--resume", "--checkpoint_every", "1000")
    wait_for(lambda: rows() >= 4, process)
    process.send_signal(signal.SIGINT)
    _, err = finish(process, code=130)
    assert f"--resume --output_dir {output_dir} continues the run" in err
    assert not _children_of(process.pid)
    done = max(int(p.name[6:]) for p in checkpoints.glob("round_*") if "temp" not in p.name)
    assert 4 <= done < ROUNDS

    # What is not said again is as it was.
    finish(start(output_dir, "--resume", small=()))
    for actual, expected in zip(checkpoint(output_dir), checkpoint(reference[0]), strict=True):
        np.testing.assert_array_equal(actual, expected)
    pd.testing.assert_frame_equal(metrics(output_dir), metrics(reference[0]))
    assert not list(checkpoints.glob("*_temp*"))


def _children_of(pid):
    """Processes whose session or parent is `pid`."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if str(pid) in (fields[1], fields[3]):
                found.append(entry.name)
    return found


def test_finished_run_returns_at_once(reference):
    before = {p: p.stat().st_mtime_ns for p in reference[0].rglob("*") if p.is_file()}
    out, _ = finish(start(reference[0], "--resume"))
    assert "test accuracy" in out
    changed = {p.name for p in before if p.stat().st_mtime_ns != before[p]}
    assert changed <= {"config.json"}


@pytest.fixture
def copy(reference, tmp_path):
    """The reference run without its summary, and its configuration."""
    from tff_fedlabel import tasks

    output_dir = tmp_path / "run"
    shutil.copytree(reference[0], output_dir)
    (output_dir / "summary.json").unlink()
    choices = dict(zip((name[2:] for name in SMALL[::2]), map(int, SMALL[1::2]), strict=True))
    return output_dir, tasks.make_config("digits", **choices)


def test_two_processes_cannot_share_a_run(copy):
    from tff_fedlabel import training

    output_dir, config = copy
    descriptor = os.open(output_dir, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(training.RunDirectoryError, match="another process"):
        training.run(config, output_dir, resume=True)
    os.close(descriptor)


def test_another_run_is_refused(copy):
    from tff_fedlabel import training

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


def test_damaged_checkpoint_is_named(copy):
    from tff_fedlabel import training

    output_dir, config = copy
    for path in (output_dir / "checkpoints" / f"round_{ROUNDS}").rglob("variables.data*"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(training.CheckpointError, match=f"^checkpoint {ROUNDS} .* delete it"):
        training.run(config, output_dir, resume=True)
    # As the message says: without it, the one before is good.
    shutil.rmtree(output_dir / "checkpoints" / f"round_{ROUNDS}")
    training.run(config, output_dir, resume=True)
    assert (output_dir / "summary.json").exists()


def test_run_that_lost_only_its_summary_is_completed(copy, reference):
    from tff_fedlabel import training

    output_dir, config = copy
    training.run(config, output_dir, resume=True)
    expected = json.loads((reference[0] / "summary.json").read_text())
    assert json.loads((output_dir / "summary.json").read_text()) == expected


def test_longer_run_continues_a_finished_one(copy):
    from tff_fedlabel import training

    output_dir, config = copy
    longer = dataclasses.replace(config, rounds=ROUNDS + 2)
    assert training.run(longer, output_dir, resume=True)["rounds"] == ROUNDS + 2
    table = pd.read_csv(output_dir / "metrics.csv")
    assert list(table["round"]) == list(range(1, ROUNDS + 3))


def test_a_goal_below_what_is_done_is_refused(copy):
    from tff_fedlabel import training

    output_dir, config = copy
    before = (output_dir / "config.json").read_text()
    with pytest.raises(training.RunDirectoryError, match=f"has done {ROUNDS} rounds"):
        training.run(dataclasses.replace(config, rounds=2), output_dir, resume=True)
    assert (output_dir / "config.json").read_text() == before
    assert not (output_dir / "summary.json").exists()


@pytest.mark.parametrize(
    "choices,words",
    [({"num_clients": 5000}, "num_clients"), ({"split": "official"}, "no published test set")],
)
def test_choices_that_do_not_fit_the_data_leave_nothing_behind(tmp_path, choices, words):
    from tff_fedlabel import tasks, training

    output_dir = tmp_path / "run"
    for _ in range(2):  # A second try meets no lock and no remains.
        with pytest.raises(training.ConfigError, match=words):
            training.run(tasks.make_config("digits", **choices), output_dir)
        assert not output_dir.exists()


def test_worker_that_dies_costs_no_finished_round(copy, monkeypatch):
    """The round is lost, the ones before are in a checkpoint, the error names the worker."""
    from tff_fedlabel import runtime, training

    output_dir, config = copy
    longer = dataclasses.replace(config, rounds=ROUNDS + 5)
    kept = {}
    use = runtime.use

    @contextlib.contextmanager
    def watched(name):
        with use(name) as handle:
            kept["processes"] = handle.processes
            yield handle

    def kill_after_two(done, _):
        if done == ROUNDS + 2:
            for pid in kept["processes"]:
                os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(training.runtimes, "use", watched)
    with pytest.raises(runtime.WorkerError):
        training.run(
            longer, output_dir, resume=True, checkpoint_every=1000, on_round=kill_after_two
        )
    assert (output_dir / "checkpoints" / f"round_{ROUNDS + 2}").exists()
