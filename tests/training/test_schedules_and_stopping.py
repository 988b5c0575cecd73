"""Learning-rate schedules, early stopping, the best checkpoint, and stops at awkward moments."""

import json
import math
import os
import signal
import threading
import time
import types

import numpy as np
import one_layer
import pandas as pd
import pytest
from small_run import SMALL

from tff_fedlabel import training
from tff_fedlabel.training import config as configuration
from tff_fedlabel.training import evaluation, experiment, loop
from tff_fedlabel.training.checkpoints import Checkpoints
from tff_fedlabel.training.interrupt import Interrupt

pytestmark = pytest.mark.usefixtures("build_once", "linear")
CHOICES = {**SMALL, "model": one_layer.NAME, "rounds": 4, "lr": 0.25}


def config_of(**choices):
    return training.make_config("digits", "fedavg", **{**CHOICES, **choices})


@pytest.mark.parametrize(
    "schedule,expected",
    [
        ("constant", [1, 1, 1, 1]),
        ("step", [1, 1, 0.1, 0.01]),
        ("inverse_sqrt", [1, 2**-0.5, 3**-0.5, 0.5]),
        ("cosine", [1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]),
    ],
)
def test_factors_of_the_schedules(schedule, expected):
    found = [configuration.lr_factor(schedule, round_num, 4) for round_num in range(4)]
    np.testing.assert_allclose(found, expected)


@pytest.fixture
def learning_rates(monkeypatch):
    """The learning rate of each round, read from the state that the round begins with."""
    seen = []
    compute = loop._Rounds._set_learning_rate

    def and_look(self):
        compute(self)
        hparams = self._process.get_hparams(self._state)
        seen.append(float(hparams["client_work"]["learning_rate"]))

    monkeypatch.setattr(loop._Rounds, "_set_learning_rate", and_look)
    return seen


def test_a_schedule_reaches_the_clients_also_when_resumed(tmp_path, learning_rates):
    config = config_of(lr_schedule="step")

    def stop_after_two(done, _):
        if done == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(training.Interrupted):
        training.run(config, tmp_path / "a", on_round=stop_after_two)
    training.run(config, tmp_path / "a", resume=True)
    assert learning_rates == pytest.approx([0.25, 0.25, 0.025, 0.0025])
    with pytest.raises(training.RunDirectoryError, match="rounds is 4 there and 8 here"):
        training.run(config_of(lr_schedule="step", rounds=8), tmp_path / "a", resume=True)


def accuracies(monkeypatch, *values):
    """Evaluations give these validation accuracies, one after the other."""
    left = list(values)

    def evaluations(an_experiment, state):
        return dict(zip(evaluation.NOT_EVALUATED, (left.pop(0), 1.0, 0.5, 1.0), strict=True))

    monkeypatch.setattr(loop, "evaluations", evaluations)


def test_early_stopping_keeps_the_best(tmp_path, monkeypatch):
    accuracies(monkeypatch, 0.3, 0.6, 0.6, 0.4, 0.9)
    config = config_of(rounds=5, eval_every=1, early_stopping_patience=2)
    summary = training.run(config, tmp_path)
    assert summary["rounds_done"] == 4 and summary["best_round"] == 2
    assert summary["best_validation_accuracy"] == 0.6
    assert summary["validation_accuracy"] == 0.4 and summary["rounds"] == 5
    assert [p.name for p in (tmp_path / "checkpoints" / "best").iterdir()] == ["round_2"]
    assert list(pd.read_csv(tmp_path / "metrics.csv")["round"]) == [1, 2, 3, 4]
    # Finished: nothing is computed again.
    assert training.run(config, tmp_path, resume=True) == json.loads(
        (tmp_path / "summary.json").read_text()
    )


def test_a_run_that_diverges_says_so_once(tmp_path, monkeypatch, capfd):
    """From the third round on no client's update is finite."""
    monkeypatch.setattr(
        loop, "lr_factor", lambda _, round_num, rounds: (1, 1, 1e38)[min(round_num, 2)]
    )
    accuracies(monkeypatch, 0.5, 0.4, 0.3, 0.3)
    training.run(config_of(lr_schedule="cosine", eval_every=1), tmp_path)
    metrics = pd.read_csv(tmp_path / "metrics.csv")
    assert list(metrics["rejected_clients"]) == [0, 0, 3, 3]
    for text in (capfd.readouterr().err, (tmp_path / "run.log").read_text()):
        (line,) = (line for line in text.splitlines() if "no client's update was finite" in line)
        assert "round 3: " in line and "--lr" in line
        assert line.endswith("The best weights so far, of round 1, are in checkpoints/best.")


def test_an_accuracy_is_read_as_it_was_written(tmp_path):
    from tff_fedlabel.training.run_directory import RunDirectory

    # Some of these are rounded by pandas' quicker way of reading, in some of its versions.
    numbers = np.random.default_rng(0).integers(1, 180, 2000)
    written = numbers / np.random.default_rng(1).integers(180, 900, 2000)
    frame = pd.DataFrame({"round": range(2000), "validation_accuracy": written})
    frame.to_csv(tmp_path / "metrics.csv", index=False)
    directory = types.SimpleNamespace(path=tmp_path)
    assert [accuracy for _, accuracy in RunDirectory.evaluated(directory, 1999)] == list(written)


@pytest.mark.parametrize("written", [False, True])
def test_the_best_round_is_kept_also_by_the_run_that_goes_on(tmp_path, monkeypatch, written):
    accuracies(monkeypatch, 0.3, 0.6, 0.5, 0.4)
    save, keep = Checkpoints.save_best, []

    def crash(self, content, round_num):
        if written:
            save(self, content, round_num)
        keep.append(round_num)
        if round_num == 2:
            raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save_best", crash)
        with pytest.raises(OSError, match="disk is full"):
            training.run(config_of(eval_every=1), tmp_path)
    assert keep == [1, 2]
    assert training.run(config_of(eval_every=1), tmp_path, resume=True)["best_round"] == 2
    assert [path.name for path in (tmp_path / "checkpoints" / "best").iterdir()] == ["round_2"]


def test_patience_survives_a_stop(tmp_path, monkeypatch):
    accuracies(monkeypatch, 0.3, 0.6, 0.5, 0.4)
    config = config_of(rounds=6, eval_every=1, early_stopping_patience=2)

    def stop_after_three(done, _):
        if done == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(training.Interrupted) as caught:
        training.run(config, tmp_path, on_round=stop_after_three)
    assert caught.value.signal_number == signal.SIGTERM
    summary = training.run(config, tmp_path, resume=True)
    assert (summary["rounds_done"], summary["best_round"]) == (4, 2)


def test_a_signal_during_an_evaluation_ends_the_run_at_once(tmp_path, monkeypatch):
    """The round's state and metrics are kept; the resumed run evaluates it and goes on."""
    expected = training.run(config_of(), tmp_path / "whole", checkpoint_every=1000)
    real, asked = loop.evaluations, []

    def slow(an_experiment, state):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        asked.append(time.monotonic())
        time.sleep(20)
        return real(an_experiment, state)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluations", slow)
        with pytest.raises(training.Interrupted, match="stopped after round 2"):
            training.run(config_of(), tmp_path / "run", checkpoint_every=1000)
        assert time.monotonic() - asked[0] < 5
    assert (tmp_path / "run" / "checkpoints" / "round_2").exists()
    assert list(pd.read_csv(tmp_path / "run" / "metrics.csv")["round"]) == [1]
    summary = training.run(config_of(), tmp_path / "run", resume=True, checkpoint_every=1000)
    tables = [
        pd.read_csv(tmp_path / name / "metrics.csv").drop(columns="seconds")
        for name in ("whole", "run")
    ]
    pd.testing.assert_frame_equal(*tables)
    for name in ("test_accuracy", "test_loss", "validation_accuracy", "best_round"):
        assert summary[name] == expected[name]


def test_a_signal_at_the_very_end_of_what_may_be_dropped():
    """It may raise when the work is done; after that no place is left where it would."""
    with Interrupt() as interrupt:
        done = False
        with pytest.raises(KeyboardInterrupt), interrupt.allowed():
            done = True
            signal.raise_signal(signal.SIGINT)
        assert done
        signal.raise_signal(signal.SIGINT)  # Files are being written: nothing happens.
        with pytest.raises(KeyboardInterrupt), interrupt.allowed():
            raise AssertionError("a signal came before")


def test_a_finished_run_is_not_the_answer_to_fewer_rounds(tmp_path):
    training.run(config_of(rounds=2), tmp_path)
    with pytest.raises(training.RunDirectoryError, match="has done 2 rounds, more than the 1"):
        training.run(config_of(rounds=1), tmp_path, resume=True)


def test_other_data_is_refused(tmp_path, monkeypatch):
    config = config_of(rounds=1)
    training.run(config, tmp_path)
    monkeypatch.setattr(experiment.Experiment, "fingerprint", lambda self: "another")
    with pytest.raises(training.RunDirectoryError, match="started with different data"):
        training.run(config_of(rounds=2), tmp_path, resume=True)
    monkeypatch.undo()


@pytest.mark.usefixtures("unbuilt")
def test_the_fingerprint_tells_the_labels_kept():
    one, other = (
        experiment.build(config_of(labeled_fraction=fraction), None).fingerprint()
        for fraction in (0.2, 0.4)
    )
    assert one != other and len(one) == 64


def test_numpy_numbers_are_numbers(tmp_path):
    config = config_of(rounds=np.int64(1), seed=np.int64(0), lr=np.float32(0.25))
    assert type(config.rounds) is int and type(config.lr) is float
    summary = training.run(config, tmp_path, checkpoint_every=np.int64(1))
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 1
    assert not math.isnan(summary["test_accuracy"])
    with pytest.raises(TypeError, match="^rounds must be a whole number"):
        config_of(rounds=1.5)
