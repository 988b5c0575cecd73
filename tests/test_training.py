"""Whole runs through the command line: what they leave behind, and that nothing can spoil them."""

import json
import pathlib
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


def start(output_dir, *flags):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *SMALL, "--output_dir", str(output_dir), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, code=0):
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out, err


def wait_for(condition, process, seconds=200):
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
    assert table["test_accuracy"].iloc[-1] == summary["test_accuracy"]
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
    dense = sorted((s for s in kernels if len(s) == 2), key=lambda s: -s[0])
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


def test_killed_anywhere_and_resumed_ends_in_the_same_weights(reference, tmp_path):
    """SIGKILL before the first round, while a checkpoint is written, and between two rounds."""
    output_dir = tmp_path / "run"
    checkpoints = output_dir / "checkpoints"

    def rows():
        path = output_dir / "metrics.csv"
        return len(path.read_text().splitlines()) - 1 if path.exists() else 0

    moments = [
        lambda: (output_dir / "config.json").exists(),
        lambda: any(checkpoints.glob("round_2_temp*")),
        lambda: rows() >= 4,
    ]
    for moment in moments:
        process = start(output_dir, "--resume")
        wait_for(moment, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finish(start(output_dir, "--resume"))
    for actual, expected in zip(checkpoint(output_dir), checkpoint(reference[0]), strict=True):
        np.testing.assert_array_equal(actual, expected)
    pd.testing.assert_frame_equal(metrics(output_dir), metrics(reference[0]))
    assert not list(checkpoints.glob("*_temp*"))


def test_interrupt_writes_a_checkpoint_and_leaves_no_process(reference, tmp_path):
    output_dir = tmp_path / "run"
    process = start(output_dir, "--checkpoint_every", "1000")
    path = output_dir / "metrics.csv"
    wait_for(lambda: path.exists() and len(path.read_text().splitlines()) >= 3, process)
    process.send_signal(signal.SIGINT)
    _, err = finish(process, code=130)
    assert "--resume continues the run" in err
    assert not _children_of(process.pid)
    done = max(int(p.name[6:]) for p in (output_dir / "checkpoints").glob("round_*"))
    assert 2 <= done < ROUNDS
    finish(start(output_dir, "--resume"))
    for actual, expected in zip(checkpoint(output_dir), checkpoint(reference[0]), strict=True):
        np.testing.assert_array_equal(actual, expected)


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


@pytest.mark.parametrize(
    "flags,words",
    [
        ([], "already holds a run"),
        (["--resume", "--lr", "0.5"], "lr is 0.05 there and 0.5 here"),
    ],
)
def test_another_run_is_refused(reference, flags, words):
    before = (reference[0] / "config.json").read_text()
    _, err = finish(start(reference[0], *flags), code=2)
    assert words in err and len(err.splitlines()) == 1
    assert (reference[0] / "config.json").read_text() == before


def test_damaged_checkpoint_is_named(reference, tmp_path):
    import shutil

    output_dir = tmp_path / "run"
    shutil.copytree(reference[0], output_dir)
    (output_dir / "summary.json").unlink()
    for path in (output_dir / "checkpoints" / f"round_{ROUNDS}").rglob("variables.data*"):
        path.write_bytes(path.read_bytes()[:100])
    _, err = finish(start(output_dir, "--resume"), code=1)
    assert f"checkpoint {ROUNDS}" in err and len(err.splitlines()) == 1


def test_run_that_lost_only_its_summary_is_completed(reference, tmp_path):
    import shutil

    output_dir = tmp_path / "run"
    shutil.copytree(reference[0], output_dir)
    (output_dir / "summary.json").unlink()
    finish(start(output_dir, "--resume"))
    expected = json.loads((reference[0] / "summary.json").read_text())
    assert json.loads((output_dir / "summary.json").read_text()) == expected


def test_longer_run_continues_a_finished_one(reference, tmp_path):
    import shutil

    output_dir = tmp_path / "run"
    shutil.copytree(reference[0], output_dir)
    finish(start(output_dir, "--resume", "--rounds", str(ROUNDS + 2)))
    table = pd.read_csv(output_dir / "metrics.csv")
    assert list(table["round"]) == list(range(1, ROUNDS + 3))
    assert json.loads((output_dir / "summary.json").read_text())["rounds"] == ROUNDS + 2
