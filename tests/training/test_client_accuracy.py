"""Accuracy by client, counted again in NumPy."""

import dataclasses
import json
import shutil

import numpy as np
import pandas as pd
import pytest
import trained_runs

from tff_fedlabel import training
from tff_fedlabel.datasets import federated
from tff_fedlabel.training import client_accuracy, loop


@pytest.fixture(scope="module")
def experiment(trained):
    return training.build(training.make_config(**training.stored_choices(trained)))


def test_a_run_writes_it(trained, experiment):
    table = pd.read_csv(trained / "client_accuracy.csv")
    assert list(table.columns) == ["client", "images", "accuracy", "part"]
    number = len(experiment.model.initial_weights[0])
    weights = (trained_runs.checkpoint(trained)[:number], ())
    clients = experiment.clients
    for row, client in enumerate(clients.client_ids):
        # One pass over the client's unlabelled images, with their hidden labels.
        data = clients.client_dataset(
            client, 0, labeled_steps=None, unlabeled_steps=None, batch_size=999,
            with_hidden_labels=True,
        )  # fmt: skip
        (batch,) = data["unlabeled"]
        logits = experiment.model.predict_on_batch(weights, batch["x"], training=False)
        hits = logits.numpy().argmax(1) == batch["y"].numpy()
        assert table["client"][row] == client and table["images"][row] == len(hits)
        assert table["accuracy"][row] == pytest.approx(hits.mean())
    assert set(table["part"]) == {"unlabeled"}
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["client_accuracy_mean"] == pytest.approx(table["accuracy"].mean())
    assert summary["client_accuracy_worst_tenth"] == pytest.approx(table["accuracy"].min())
    assert (trained / "client_accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_clients_without_unlabelled_images_or_without_any(experiment):
    x = experiment.source.train.x[:12]
    y = experiment.source.train.y[:12]
    labeled = np.array([True] * 6 + [False] * 6)
    owners = ["a"] * 3 + ["b"] * 3 + ["a"] * 6
    data = federated.from_arrays(x, y, owners, labeled, num_classes=10, hidden_y=y)
    model = experiment.model
    rows = client_accuracy.measure(model, _Weights(model), data)
    hits = model.predict_on_batch(model.initial_weights, x, training=False).numpy().argmax(1) == y
    assert list(rows["part"]) == ["unlabeled", "labeled"] and list(rows["images"]) == [6, 3]
    np.testing.assert_allclose(rows["accuracy"], [hits[6:].mean(), hits[3:6].mean()])
    # Nothing is known of the unlabelled images in real data.
    data = federated.from_arrays(x, y, owners, labeled, num_classes=10)
    rows = client_accuracy.measure(model, _Weights(model), data)
    assert list(rows["part"]) == ["labeled"] * 2 and list(rows["images"]) == [3, 3]
    np.testing.assert_allclose(rows["accuracy"], [hits[:3].mean(), hits[3:6].mean()])


class _Weights:
    def __init__(self, model):
        self.trainable, self.non_trainable = model.initial_weights


def test_a_client_without_images_counts_for_nothing(tmp_path):
    rows = pd.DataFrame(
        {
            "client": ["a", "b", "c"],
            "images": [4, 0, 2],
            "accuracy": [0.5, np.nan, 1.0],
            "part": ["unlabeled", "labeled", "labeled"],
        }
    )
    short = client_accuracy.in_short(rows)
    assert short == {"client_accuracy_mean": 0.75, "client_accuracy_worst_tenth": 0.5}
    client_accuracy.write(rows, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"client_accuracy.csv", "client_accuracy.png"}
    nothing = client_accuracy.in_short(rows[1:2])
    assert all(np.isnan(value) for value in nothing.values())
    client_accuracy.write(rows[1:2], tmp_path)


@pytest.mark.parametrize("number,worst", [(1, 1), (19, 1), (20, 2), (29, 2), (100, 10)])
def test_the_worst_tenth(number, worst):
    accuracy = np.random.default_rng(0).uniform(size=number)
    short = client_accuracy.in_short(pd.DataFrame({"accuracy": accuracy}))
    expected = np.mean(sorted(accuracy)[:worst])
    assert short["client_accuracy_worst_tenth"] == pytest.approx(expected)


def test_it_can_be_left_out_and_measured_later(trained, tmp_path, build_once, monkeypatch):
    """A run that goes on for longer may change its mind."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "client_accuracy.csv").unlink()
    config = training.make_config(**training.stored_choices(run))
    longer = dataclasses.replace(config, rounds=5, client_accuracy=False)
    measured = []
    monkeypatch.setattr(loop.client_accuracy, "measure", lambda *_: measured.append(1))
    summary = training.run(longer, run, resume=True)
    assert not measured and "client_accuracy_mean" not in summary
    assert not (run / "client_accuracy.csv").exists()
    assert training.stored_choices(run)["client_accuracy"] is False
    monkeypatch.undo()
    more = dataclasses.replace(config, rounds=6, client_accuracy=True)
    assert "client_accuracy_mean" in training.run(more, run, resume=True)
    assert training.stored_choices(run)["client_accuracy"] is True
