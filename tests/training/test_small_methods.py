"""The four small methods through the trainer: stopped, resumed, in other runtimes."""

import json
import os
import signal
import subprocess
import sys
import time

import four_methods
import numpy as np
import one_layer
import pandas as pd
import pytest
import tensorflow as tf
from weights import assert_weights_equal

from tff_fedlabel import algorithms
from tff_fedlabel.training import experiment

ROUNDS = 4


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(algorithms, "METHODS", dict(algorithms.METHODS))
    for method in four_methods.ALL:
        algorithms.register(method)


def checkpoint(directory, round_num=ROUNDS):
    """Every number of a checkpoint, read without the code under test."""
    saved = tf.saved_model.load(str(directory / "checkpoints" / f"round_{round_num}"))()
    return [np.asarray(value) for value in tf.nest.flatten(saved)]


@pytest.fixture
def run(main, small_flags, linear, tmp_path):
    def run(method, name, *flags):
        directory = tmp_path / name
        flags = (*small_flags, "--rounds", str(ROUNDS), "--output_dir", str(directory), *flags)
        return main("--algorithm", method.name, "--model", linear, *flags), directory

    return run


@pytest.fixture(scope="module")
def wholes():
    """Method -> the directory of its run that nothing stopped."""
    return {}


@pytest.fixture
def whole(method, wholes, run):
    if method not in wholes:
        code, wholes[method] = run(method, "whole", "--checkpoint_every", str(ROUNDS // 2))
        assert code == 0
    return wholes[method]


by_name = pytest.mark.parametrize("method", four_methods.ALL, ids=lambda method: method.name)


@by_name
@pytest.mark.usefixtures("build_once")
def test_stopped_and_resumed_it_ends_in_the_same_bits(method, run, whole, monkeypatch, capfd):
    cohort = experiment.Experiment.cohort

    def and_stop(self, round_num, memory):
        if round_num == 2:
            signal.raise_signal(signal.SIGTERM)
        return cohort(self, round_num, memory)

    with monkeypatch.context() as patch:
        patch.setattr(experiment.Experiment, "cohort", and_stop)
        assert run(method, "stopped", "--checkpoint_every", "1000")[0] == 143
    code, stopped = run(method, "stopped", "--resume")
    assert code == 0
    told = "a strength of 0.5 is little in 4 rounds"
    for text in (capfd.readouterr().err, (whole / "run.log").read_text()):
        assert (told in text) == (method is four_methods.AT_SERVER)
    assert_weights_equal(checkpoint(stopped), checkpoint(whole))
    tables = [pd.read_csv(d / "metrics.csv").drop(columns="seconds") for d in (whole, stopped)]
    pd.testing.assert_frame_equal(*tables)
    summary = json.loads((whole / "summary.json").read_text())
    if method is four_methods.WITH_MEMORY:
        drawn = set()
        for round_num in range(ROUNDS):
            rng = np.random.default_rng(np.random.SeedSequence((1, 0, round_num)))
            drawn |= set(rng.choice(6, size=3, replace=False).tolist())
        floats = (64 + 1) * 10 + 1  # Of the last update, and the number of rounds.
        assert summary["memory_bytes"] == 4 * floats * len(drawn)
        assert tables[0]["memory_bytes"].iloc[-1] == summary["memory_bytes"]
    if method is four_methods.LABELS_AT_SERVER:
        assert summary["labeled_images_at_server"] == 6 * round(0.2 * 1437 / 6)


@by_name
@pytest.mark.usefixtures("shared_worker")
def test_the_worker_computes_the_same(method, run, whole):
    """As far as the other run's checkpoint before the last one."""
    half = ROUNDS // 2
    code, local = run(method, "local", "--runtime", "local", "--rounds", str(half))
    assert code == 0
    for a, b in zip(checkpoint(local, half), checkpoint(whole, half), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.usefixtures("build_once")
def test_memory_survives_a_kill(run, small_flags, tmp_path):
    """By SIGKILL in the middle of a run of its own process."""
    method, killed = four_methods.WITH_MEMORY, tmp_path / "killed"
    flags = [*small_flags, "--algorithm", method.name, "--model", one_layer.NAME]
    flags += ["--rounds", "400"]
    script = (
        "import sys, four_methods, one_layer\nfrom tff_fedlabel import algorithms, cli, models\n"
        "algorithms.register(four_methods.WITH_MEMORY)\n"
        "models.MODELS[one_layer.NAME] = one_layer.build\nsys.exit(cli.main(sys.argv))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, *flags, "--output_dir", str(killed)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 400
    while not list(killed.glob("checkpoints/round_[3-9]")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = max(
        int(path.name[6:])
        for path in killed.glob("checkpoints/round_*")
        if "_" not in path.name[6:]
    )
    goal = ("--rounds", str(done + 2), "--checkpoint_every", "1000")
    assert run(method, "killed", "--resume", *goal)[0] == 0
    assert run(method, "whole", *goal)[0] == 0
    assert_weights_equal(checkpoint(killed, done + 2), checkpoint(tmp_path / "whole", done + 2))
