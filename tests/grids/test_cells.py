"""Cells: names, flags, whether they are finished, what a run gave."""

import json

import numpy as np
import pandas as pd
import pytest
from grids import cells
from hand_made_runs import config, write_run

from tff_fedlabel import training


def cell(**own):
    return cells.make_cell("digits", "fedlabel", {"rounds": 4}, {"seed": 0, **own})


def test_names_and_flags_say_what_differs():
    made = cell(lr=0.1, client_accuracy=False)
    assert made.name == (
        "fedlabel-alpha_1-labeled_fraction_0.2-seed_0-lr_0.1-client_accuracy_False"
    )
    assert made.flags() == [
        *("--task=digits", "--algorithm=fedlabel", "--rounds=4", "--seed=0", "--lr=0.1"),
        "--noclient_accuracy",
    ]
    assert made.config.lr == 0.1 and not made.config.client_accuracy
    assert cell(alpha=float("inf")).name.startswith("fedlabel-alpha_inf-")
    assert len({cell(seed=seed).name for seed in range(3)}) == 3
    assert cell(lr=0.1234567).name != cell(lr=0.12345678).name


def test_runs_of_other_choices_cannot_have_the_same_name(tmp_path):
    same, other = (
        cells.make_cell("digits", "fedlabel", {"lr": lr}, {"seed": 0}) for lr in (0.1, 0.2)
    )
    assert cells.by_name([same, same]) == [same]
    with pytest.raises(ValueError, match="same directory, .*lr is 0.1 there and 0.2 here"):
        cells.by_name([same, other])


def test_a_summary_without_its_seconds_is_named(tmp_path):
    made = cell()
    write_run(made.directory(tmp_path), made.config, [0.1] * 4)
    summary = made.directory(tmp_path) / "summary.json"
    summary.write_text(json.dumps({"rounds": 4}))
    with pytest.raises(training.RunDirectoryError, match="summary.json is damaged .KeyError"):
        cells.result(made.directory(tmp_path))


def test_finished_unfinished_and_none(tmp_path):
    made = cell()
    assert not made.is_finished(tmp_path) and made.rounds_done(tmp_path) == 0
    write_run(made.directory(tmp_path), made.config, [0.1, 0.2], finished=False)
    assert not made.is_finished(tmp_path) and made.rounds_done(tmp_path) == 2
    summary = made.directory(tmp_path) / "summary.json"
    summary.write_text(json.dumps({"rounds": 4}))
    with pytest.raises(training.RunDirectoryError, match="metrics.csv is damaged: it ends in .* 2"):
        made.is_finished(tmp_path)
    write_run(made.directory(tmp_path), made.config, [0.1, 0.2, None, 0.2])
    assert made.is_finished(tmp_path)
    longer = cells.Cell(made.name, config(rounds=6), {})
    assert not longer.is_finished(tmp_path)
    shorter = cells.Cell(made.name, config(rounds=2), {})
    with pytest.raises(training.RunDirectoryError, match="4 rounds, more than the 2 wanted"):
        shorter.is_finished(tmp_path)


def test_a_finished_run_that_goes_on_is_neither_finished_nor_damaged(tmp_path):
    made = cell()
    write_run(made.directory(tmp_path), config(rounds=2), [0.1, 0.2, 0.3])
    summary = made.directory(tmp_path) / "summary.json"
    assert json.loads(summary.read_text())["rounds"] == 2
    longer = cells.Cell(made.name, config(rounds=6), {})
    assert not longer.is_finished(tmp_path) and longer.rounds_done(tmp_path) == 3


def test_a_run_that_was_stopped_early_is_finished(tmp_path):
    choices = {"early_stopping_patience": 1}
    made = cells.Cell("early", config(**choices), choices)
    write_run(made.directory(tmp_path), made.config, [0.2, 0.1])
    summary = made.directory(tmp_path) / "summary.json"
    summary.write_text(json.dumps({"rounds": 4, "rounds_done": 2}))
    assert made.is_finished(tmp_path)


def test_a_run_of_other_choices_is_refused(tmp_path):
    made = cell()
    write_run(made.directory(tmp_path), config(lr=0.7), [0.1] * 4)
    with pytest.raises(training.RunDirectoryError, match="lr is 0.7 there and 0.05 here") as error:
        made.is_finished(tmp_path)
    assert len(str(error.value).splitlines()) == 1
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("evaluated", range(1, 10))
def test_results_are_means_of_the_last_quarter(tmp_path, evaluated):
    rng = np.random.default_rng(evaluated)
    test, validation = rng.random((2, evaluated)).round(3).tolist()
    # Evaluated every second round.
    interleaved = [[v for a in values for v in (None, a)] for values in (test, validation)]
    write_run(
        tmp_path / "run",
        config(rounds=2 * evaluated),
        interleaved[0],
        validation_accuracy=interleaved[1],
    )
    found = cells.result(tmp_path / "run")
    number = -(-evaluated // 4)
    assert found["evaluations"] == number
    np.testing.assert_allclose(found["test_accuracy"], np.mean(test[evaluated - number :]))
    np.testing.assert_allclose(
        found["validation_accuracy"], np.mean(validation[evaluated - number :])
    )
    assert found["last_test_accuracy"] == test[-1]
    assert found["seconds_per_round"] == 0.5


def test_no_result_of_an_unfinished_or_damaged_run(tmp_path):
    write_run(tmp_path / "run", config(), [0.1], finished=False)
    with pytest.raises(training.RunDirectoryError, match="not finished"):
        cells.result(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("{")
    with pytest.raises(training.RunDirectoryError, match="damaged"):
        cells.result(tmp_path / "run")


def test_without_evaluations_there_is_no_number():
    metrics = pd.DataFrame({"round": [1, 2], "test_accuracy": [None, None]})
    assert len(cells.evaluations(metrics, "test_accuracy")) == 0
    assert len(cells.evaluations(metrics, "other")) == 0
