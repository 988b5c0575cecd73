"""A run that starts from the model of another one."""

import dataclasses
import functools
import json
import shutil
import signal
import types

import numpy as np
import pytest
import trained_runs
from weights import assert_weights_equal

from tff_fedlabel import algorithms, runtime, training
from tff_fedlabel.training import experiment as experiments
from tff_fedlabel.training import starting_point

FEDAVG = {**trained_runs.CHOICES, "rounds": 2, "tau": 1, "seed": 5, "client_accuracy": False}
NUMBER = 8  # The weights of a cnn: four layers with kernel and bias.


def halved(setup):
    return tuple(0.5 * weight for weight in setup.model.initial_weights[0])


@pytest.fixture
def other(trained, tmp_path):
    """A copy of the trained run, to be taken away."""
    return shutil.copytree(trained, tmp_path / "other")


@pytest.mark.parametrize("own", [False, True])
def test_the_first_state_holds_the_trained_weights(trained, own, monkeypatch):
    """A method with initial weights of its own makes them from the trained ones."""
    method = dataclasses.replace(algorithms.METHODS["fedavg"], name="halved")
    if own:
        method = dataclasses.replace(method, initial_weights=halved)
    monkeypatch.setattr(algorithms, "METHODS", {**algorithms.METHODS, "halved": method})
    config = training.make_config("digits", "halved", init_from=trained, **FEDAVG)
    assert config.init_from == str(trained)
    process = training.build(config).process
    with runtime.use("device"):
        weights = process.get_model_weights(process.initialize()).trainable
    expected = trained_runs.checkpoint(trained)[:NUMBER]
    assert_weights_equal(weights, [w * (0.5 if own else 1) for w in expected])


@pytest.fixture
def built(compile_once, monkeypatch):
    """Builds once; notes the weights that each start was given."""
    build, given, cache = experiments.build, [], []

    @functools.wraps(build)
    def noting(config, data_dir, initial_weights=None):
        given.append(initial_weights)
        if not cache:
            cache.append(build(config, data_dir, initial_weights=initial_weights))
        return dataclasses.replace(cache[0], config=config)

    monkeypatch.setattr(experiments, "build", noting)
    return given


def test_a_resumed_run_needs_the_other_no_more(other, built, tmp_path, monkeypatch, capfd):
    config = training.make_config("digits", "fedavg", init_from=other, **FEDAVG)
    summary = training.run(config, tmp_path / "whole", runtime="device", checkpoint_every=2)
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["init_from"] == str(other)
    assert summary["init_from"] == str(other)
    told = f"starts from the weights of the run in {other} after round {trained_runs.ROUNDS}"
    assert capfd.readouterr().err.splitlines() == [told]
    assert (tmp_path / "whole" / "run.log").read_text().count(told) == 1

    def stop(*_):
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(experiments.Experiment, "cohort", stop)
        with pytest.raises(training.Interrupted):
            training.run(config, tmp_path / "stopped", runtime="device")
    # Before the first checkpoint.
    assert not list((tmp_path / "stopped").glob("checkpoints/round_*"))
    expected = trained_runs.checkpoint(other)[:NUMBER]
    shutil.rmtree(other)
    capfd.readouterr()
    training.run(config, tmp_path / "stopped", resume=True)
    assert not capfd.readouterr().err  # It has weights of its own by now.
    assert built[:2] == [None, None]
    assert_weights_equal(built[2], expected)
    whole, stopped = (
        trained_runs.checkpoint(tmp_path / n, "round_2") for n in ("whole", "stopped")
    )
    assert_weights_equal(stopped, whole)
    moved = [np.abs(a - b).max() for a, b in zip(whole, expected, strict=False)]
    assert 0 < max(moved) < 0.5  # Trained on, from there.


def source(shape=(8, 8, 1), names=tuple("0123456789")):
    return types.SimpleNamespace(
        train=types.SimpleNamespace(x=np.zeros((1, *shape), np.uint8)), label_names=names
    )


def test_what_fits(trained):
    config = training.make_config("digits", "fedlabel", **FEDAVG)
    weights = starting_point.read(trained).weights_for(config, source())
    assert_weights_equal(weights, trained_runs.checkpoint(trained)[:NUMBER])


@pytest.mark.parametrize(
    "choices,images,words",
    [
        ({"model": "resnet18"}, {}, "model is cnn there and resnet18 here"),
        ({"width": 9}, {}, "width is 8 there and 9 here"),
        ({"width": None}, {}, "width is 8 there and 16 here"),  # The task's.
        ({}, {"shape": (28, 28, 1)}, "images are 8x8x1 there and 28x28x1 here"),
        ({}, {"names": tuple("abc")}, "there are 10 classes there and 3 here"),
        ({}, {"names": tuple("0123456798")}, "class 8 is '8' there and '9' here"),
    ],
)
def test_what_does_not_fit(trained, choices, images, words):
    config = training.make_config("digits", **{**FEDAVG, **choices})
    with pytest.raises(ValueError) as caught:
        starting_point.read(trained).weights_for(config, source(**images))
    assert str(caught.value) == f"init_from {trained} holds another model: {words}."


def test_wrong_use_of_the_command_line(main, tmp_path, trained, capfd):
    """Told in one line, before data is looked for; nothing is left behind."""
    output = tmp_path / "run"
    flags = ("--task", "cifar100", "--data_dir", str(tmp_path), "--output_dir", str(output))
    assert main(*flags, "--init_from", "nowhere") == 2
    out, err = capfd.readouterr()
    assert "nowhere holds no run" in err and len(err.splitlines()) == 1
    assert not output.exists()
    assert main("--width", "5", "--init_from", str(trained), "--output_dir", str(output)) == 2
    out, err = capfd.readouterr()
    assert "width is 8 there and 5 here" in err and len(err.splitlines()) == 1
    assert not output.exists()


def test_a_damaged_copy_of_the_weights(trained, tmp_path):
    config = training.make_config("digits", "fedavg", init_from=trained, **FEDAVG)
    stored = {**config.choices(), "task": "digits"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    (tmp_path / "initial_weights.npz").write_bytes(b"PK nothing")
    with pytest.raises(training.RunDirectoryError, match="initial_weights.npz is damaged"):
        training.run(config, tmp_path, resume=True)
