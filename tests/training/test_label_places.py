"""Runs whose labels are at the server or at some clients, and methods that have no use for it."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from small_run import SMALL

from tff_fedlabel import algorithms, training
from tff_fedlabel.algorithms import Method, fedlabel
from tff_fedlabel.datasets import federated, server_labels
from tff_fedlabel.training import experiment, run_directory

PLACES = ("every_client", "server", "some_clients")


@pytest.mark.parametrize("algorithm, default", [("fedlabel", 0), ("semifl", 1), ("rscfed", 2)])
def test_a_method_has_a_place_of_its_own(algorithm, default):
    assert training.make_config("digits", algorithm).labels_at == PLACES[default]
    assert training.make_config("cifar10", algorithm).labels_at == PLACES[default]
    possible = algorithms.METHODS[algorithm].labels_at
    for place in PLACES:
        if place in possible:
            assert training.make_config("digits", algorithm, labels_at=place).labels_at == place
            continue
        with pytest.raises(ValueError) as caught:
            training.make_config("digits", algorithm, labels_at=place)
        assert str(caught.value) == (
            f"labels_at must be {' or '.join(possible)} with the algorithm {algorithm}, "
            f"got '{place}'."
        )


def test_digits_has_values_for_rscfed():
    config = training.make_config("digits", "rscfed")
    assert config.lr == 0.2 and config.algorithm_config().labeled_factor == 6.0
    # Of 5 clients in a round: with the default of 5 each group would be all of them.
    assert config.algorithm_config().group_size == 3 < config.clients_per_round
    assert training.make_config("digits", "semifl").lr == 0.05


def test_on_the_command_line(main, tmp_path, capfd):
    output = tmp_path / "run"
    for algorithm, place in (("fedavg", "server"), ("semifl", "every_client"), ("fedavg", "sky")):
        flags = ("--algorithm", algorithm, "--labels_at", place, "--output_dir", str(output))
        assert main(*flags) == 2
        error = capfd.readouterr().err
        assert "labels_at" in error and place in error and len(error.splitlines()) == 1
        assert not output.exists()


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"labels_at": ()}, "labels_at of the method own must be a tuple"),
        ({"labels_at": "server"}, "labels_at of the method own must be a tuple"),
        ({"labels_at": ("sky",)}, "labels_at of the method own 'sky' is unknown"),
        ({"labels_at": ("server",)}, "the method own has labels at the server but no"),
    ],
)
def test_wrong_places_of_a_method(fields, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        Method("own", fedlabel.FedLabelConfig, fedlabel.client_update, **fields)


@pytest.fixture
def run(main, small_flags, linear, tmp_path):
    def run(algorithm, name, *flags):
        directory = tmp_path / name
        parts = ("--strong_augment", "none", "--weak_augment", "none", "--model", linear)
        flags = (*small_flags, *parts, "--output_dir", str(directory), *flags)
        return main("--algorithm", algorithm, *flags), directory

    return run


@pytest.mark.usefixtures("build_once")
def test_labels_at_the_server(run):
    flags = ("--rounds", "4", "--threshold", "0.15", "--server_batch_size", "32")
    once = ("--client_accuracy", "--checkpoint_every", "1000")
    code, whole = run("semifl", "whole", *flags, *once)
    assert code == 0
    summary = json.loads((whole / "summary.json").read_text())
    labeled = 6 * round(0.2 * (1437 // 6))
    assert summary["labels_at"] == "server" and summary["labeled_images_at_server"] == labeled
    assert json.loads((whole / "config.json").read_text())["labels_at"] == "server"
    metrics = pd.read_csv(whole / "metrics.csv")
    assert metrics["kept_fraction"].iloc[-1] > 0
    # Of the server's images.
    assert metrics["labeled_loss"].iloc[-1] < metrics["labeled_loss"].iloc[0]
    assert metrics["labeled_accuracy"].iloc[-1] > metrics["labeled_accuracy"].iloc[0]
    table = pd.read_csv(whole / "partition.csv")
    assert table[table["part"] == "labeled"]["images"].sum() == 0
    assert table[table["part"] == "server"]["images"].tolist() == [labeled]
    accuracy = pd.read_csv(whole / "client_accuracy.csv")
    assert set(accuracy["part"]) == {"unlabeled"}
    training.write_report([whole], whole / "report.html")
    page = (whole / "report.html").read_text()
    assert f"The server has {labeled} labelled images." in page and "labels at" in page

    assert run("semifl", "half", *flags, "--rounds", "2")[0] == 0
    code, half = run("semifl", "half", *flags, "--resume")
    assert code == 0
    for a, b in zip(*(_checkpoint(d) for d in (whole, half)), strict=True):
        np.testing.assert_array_equal(a, b)


def _checkpoint(directory):
    saved = tf.saved_model.load(str(directory / "checkpoints" / "round_4"))()
    return [np.asarray(value) for value in tf.nest.flatten(saved)]


def test_labels_at_some_clients(run, capfd):
    """Rounds in which no client has a label, or each, are like others."""
    flags = ("--rounds", "4", "--labels_at", "some_clients", "--clients_per_round", "1")
    flags += ("--client_accuracy", "--checkpoint_every", "1000")
    code, directory = run("fedlabel", "some", *flags, "--labeled_fraction", "0.4")
    assert code == 0
    table = pd.read_csv(directory / "partition.csv").pivot(
        index="client", columns="part", values="images"
    )
    chosen = table["labeled"] > 0
    assert chosen.sum() == 2 and (table["unlabeled"] == 0).tolist() == chosen.tolist()
    drawn = []
    for round_num in range(4):
        rng = np.random.default_rng(np.random.SeedSequence((1, 0, round_num)))
        drawn += rng.choice(6, size=1, replace=False).tolist()
    metrics = pd.read_csv(directory / "metrics.csv")
    with_labels = [bool(chosen[client]) for client in drawn]
    assert metrics["labeled_loss"].notna().tolist() == with_labels
    assert metrics["labeled_accuracy"].notna().tolist() == with_labels
    accuracy = pd.read_csv(directory / "client_accuracy.csv")
    assert (accuracy["part"] == "labeled").tolist() == chosen.tolist()


def test_runs_from_before_the_choice_existed_go_on(tmp_path):
    config = training.make_config("digits", "fedlabel", **SMALL)
    run_directory.RunDirectory(tmp_path, config, False, "device", {}).close()
    stored = json.loads((tmp_path / "config.json").read_text())
    for name in ("labels_at", "server_momentum"):
        del stored[name]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    run_directory.RunDirectory(tmp_path, config, True, "device", {}).close()
    other = dataclasses.replace(config, labels_at="some_clients")
    with pytest.raises(training.RunDirectoryError, match="labels_at is 'every_client' there"):
        run_directory.RunDirectory(tmp_path, other, True, "device", {})


RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 256, (60, 8, 8, 1)).astype(np.uint8), RNG.integers(0, 3, 60)


def test_own_data_that_says_who_is_labelled(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=IMAGES, y=np.where(np.arange(60) % 2, LABELS, -1))
    place = {name: training.make_config(path, name).labels_at for name in algorithms.METHODS}
    assert place["fedlabel"] == place["rscfed"] == "every_client"
    assert place["semifl"] == "server"
    with pytest.raises(ValueError, match="^labels_at must not be 'some_clients' for mine.npz"):
        training.make_config(path, "rscfed", labels_at="some_clients")
    np.savez(path, x=IMAGES, y=LABELS)
    assert training.make_config(path, "rscfed").labels_at == "some_clients"


def test_own_clients(linear, request):
    owners = np.array(["ann", "bob", "cy"])[np.arange(60) % 3]
    clients = federated.from_arrays(IMAGES, LABELS, owners, np.arange(60) % 4 == 0, num_classes=3)
    options = {"batch_size": 4, "tau": 1, "tau_unlabeled": 1, "strong_augment": "none"}

    def make(clients, method, **choices):
        more = {} if method == "fedavg" else {**options, "weak_augment": "none"}
        return training.make_experiment(clients, linear, method, **more, **choices)

    made = make(clients, "semifl")
    assert made.config.labels_at == "server" and made.config.labeled_fraction == 0.25
    assert isinstance(made.clients, server_labels.LabelsAtServer)
    assert made.clients.sizes()["labeled"].sum() == 0
    assert len(made.clients.labeled_arrays()["y"]) == 15
    request.getfixturevalue("unbuilt")  # The rest is decided before a process is built.
    assert make(clients, "rscfed").config.labels_at == "every_client"
    with pytest.raises(ValueError, match="^labels_at must not be 'some_clients' for one's own"):
        make(clients, "rscfed", labels_at="some_clients")
    with pytest.raises(ValueError, match="^labels_at must be 'server', where the labels are"):
        make(made.clients, "fedavg", labels_at="every_client")
    with pytest.raises(ValueError, match="^labels_at must be every_client or some_clients with"):
        make(made.clients, "fedavg")
    assert isinstance(made, experiment.Experiment)
