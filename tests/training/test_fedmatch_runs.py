"""FedMatch through the trainer: stopped between two refreshes of the helpers, and resumed."""

import json
import signal

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from weights import assert_weights_equal

from tff_fedlabel.training import experiment

ROUNDS = 6
FLAGS = "--algorithm fedmatch --h_interval 3 --lr 0.005 --rounds 6 --strong_augment none".split()


def checkpoint(directory):
    """Every number of the last checkpoint, read without the code under test."""
    saved = tf.saved_model.load(str(directory / "checkpoints" / f"round_{ROUNDS}"))()
    return [np.asarray(value) for value in tf.nest.flatten(saved)]


@pytest.mark.usefixtures("build_once")
def test_stopped_and_resumed_it_ends_in_the_same_bits(
    main, small_flags, linear, tmp_path, monkeypatch
):
    """The helpers of rounds 2 to 4 are those of round 2; it is stopped before round 4."""

    def run(name, *flags):
        more = ("--model", linear, "--output_dir", str(tmp_path / name))
        return main(*small_flags, *FLAGS, *more, *flags)

    assert run("whole", "--checkpoint_every", "1000") == 0
    cohort = experiment.Experiment.cohort

    def and_stop(self, round_num, memory):
        if round_num == 4:
            signal.raise_signal(signal.SIGTERM)
        return cohort(self, round_num, memory)

    with monkeypatch.context() as patch:
        patch.setattr(experiment.Experiment, "cohort", and_stop)
        assert run("stopped", "--checkpoint_every", "1000") == 143
    assert run("stopped", "--resume") == 0
    whole, stopped = (checkpoint(tmp_path / name) for name in ("whole", "stopped"))
    assert_weights_equal(whole, stopped)
    tables = [
        pd.read_csv(tmp_path / name / "metrics.csv").drop(columns="seconds")
        for name in ("whole", "stopped")
    ]
    pd.testing.assert_frame_equal(*tables)
    counts = tables[0]["helpers_per_client"]
    assert list(counts[:2]) == [0, 0] and (counts[2:] > 0).any()
    weights = (64 + 1) * 10
    np.testing.assert_allclose(tables[0]["helper_bytes"], counts * 3 * 4 * weights, rtol=1e-6)
    # Of each client that took part two snapshots: psi, 10 probabilities and a round; 3 settings.
    drawn = set()
    for round_num in range(ROUNDS):
        rng = np.random.default_rng(np.random.SeedSequence((1, 0, round_num)))
        drawn |= set(rng.choice(6, size=3, replace=False).tolist())
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["memory_bytes"] == len(drawn) * 4 * (2 * (weights + 11) + 3)
