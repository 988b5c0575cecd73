"""The data source for `tff.program`: its draws, its position, its type."""

import asyncio
import collections
import copy
import gc
import json

import numpy as np
import pytest
import tensorflow_federated as tff
from small_program import CLIENTS, OPTIONS, fed_eval, make_clients, make_process

from tff_fedlabel import runtime, training
from tff_fedlabel.datasets import data_source
from tff_fedlabel.training import experiment as experiments


@pytest.fixture(scope="module")
def clients():
    return make_clients()


def read(cohort):
    return [
        [[v.tobytes() for v in batch.values()] for batch in part.as_numpy_iterator()]
        for client in cohort
        for part in client.values()
    ]


def test_types_are_those_of_the_processes(clients):
    source = clients.data_source(**OPTIONS)
    for made in (source, source.iterator()):
        assert made.federated_type == make_process().next.type_signature.parameter[1]
    source = clients.evaluation_source(batch_size=4)
    for made in (source, source.iterator()):
        assert made.federated_type == fed_eval().next.type_signature.parameter[1]


def test_clients_are_those_of_the_documented_draw(clients):
    iterator = clients.data_source(**OPTIONS).iterator()
    drawn = set()
    for round_num in range(20):
        rng = np.random.default_rng(np.random.SeedSequence((1, OPTIONS["seed"], round_num)))
        expected = rng.choice(CLIENTS, size=3, replace=False).tolist()
        cohort = iterator.select(3)
        assert list(cohort.client_ids) == expected and len(set(expected)) == 3
        assert read(cohort) == read(clients.cohort(expected, round_num, **OPTIONS))
        drawn.update(expected)
    assert drawn == set(range(CLIENTS))
    everyone = clients.data_source(**OPTIONS).iterator().select()
    assert sorted(everyone.client_ids) == clients.client_ids


def test_every_cohort_is_equally_likely(clients):
    counts = collections.Counter(
        frozenset(clients.draw_clients(3, round_num).tolist()) for round_num in range(2000)
    )
    assert len(counts) == 20  # 6 over 3
    # Chi-square with 19 degrees of freedom: 43.8 at one in a thousand.
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 43.8


def test_an_experiments_source_has_its_cohorts():
    config = training.make_config("digits", num_clients=7, clients_per_round=3, seed=5, tau=2)
    experiment = experiments.build(config)
    iterator = experiment.data_source().iterator()
    assert iterator.federated_type == experiment.process.next.type_signature.parameter[1]
    for round_num in range(3):
        found, expected = iterator.select(3), experiment.cohort(round_num)
        assert found.client_ids == expected.client_ids
        assert read(found) == read(expected)


def test_the_position_is_seed_and_round_and_goes_on_there(clients):
    source = clients.data_source(**OPTIONS)
    iterator = source.iterator()
    for _ in range(4):
        iterator.select(2)
    stored = iterator.to_bytes()
    position = json.loads(stored)
    assert (position["seed"], position["round"]) == (3, 4) and len(stored) < 100
    again = data_source.RoundDataSourceIterator.from_bytes(stored)
    assert again == iterator and again.round_num == 4
    copied = copy.deepcopy(iterator)
    expected = read(iterator.select(3))
    assert again != iterator and copied == again  # A copy stays where it is.
    assert read(again.select(3)) == expected == read(copied.select(3))
    # The images are shared, not copied.
    assert copied._source is source


def test_a_position_belongs_to_data_and_options(clients):
    source = clients.data_source(**OPTIONS)
    stored = source.iterator().to_bytes()
    assert make_clients().data_source(**OPTIONS).iterator().to_bytes() == stored
    for other in (
        make_clients(7).data_source(**OPTIONS),
        clients.data_source(**{**OPTIONS, "seed": 4}),
        clients.data_source(**{**OPTIONS, "batch_size": 5}),
        clients.evaluation_source(batch_size=4, seed=3),
    ):
        assert other.iterator().to_bytes() != stored
    del source
    gc.collect()
    with pytest.raises(data_source.DataSourceError, match="another data source"):
        data_source.RoundDataSourceIterator.from_bytes(stored)
    for broken in (b"", b"\x00\xff", b"[]", b'{"source": "a", "round": -1}', b'{"round": 1}'):
        with pytest.raises(data_source.DataSourceError, match="not the position"):
            data_source.RoundDataSourceIterator.from_bytes(broken)


@pytest.mark.parametrize("number", [0, -1, CLIENTS + 1, 2.0, True, "3"])
def test_wrong_numbers_of_clients_are_refused(clients, number):
    iterator = clients.data_source(**OPTIONS).iterator()
    with pytest.raises(ValueError, match="^number of clients must be a whole number"):
        iterator.select(number)
    assert iterator.round_num == 0


def test_tffs_state_manager_keeps_it(clients, tmp_path):
    source = clients.data_source(**OPTIONS)
    iterator = source.iterator()
    iterator.select(2)
    manager = tff.program.FileProgramStateManager(str(tmp_path))
    asyncio.run(manager.save((np.float32(1), iterator), version=1))
    (_, found), version = asyncio.run(manager.load_latest((np.float32(0), source.iterator())))
    assert version == 1 and found == iterator


def test_fed_eval_is_numpys_accuracy(clients):
    """Also with a part of the clients."""
    rng = np.random.default_rng(5)
    kernel, bias = rng.normal(size=(16, 3)).astype(np.float32), np.float32([0.1, 0, -0.1])
    source = clients.evaluation_source(batch_size=4)
    for number in (6, 4):
        shard = source.iterator().select(number)
        batches = [batch for client in shard for batch in client.as_numpy_iterator()]
        # uint8 images are divided by 255.
        x = np.concatenate([b["x"] for b in batches]).reshape(-1, 16).astype(np.float64) / 255
        y = np.concatenate([b["y"] for b in batches])
        logits = x @ kernel + bias
        accuracy = np.mean(np.argmax(logits, axis=1) == y)
        loss = np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y])
        with runtime.use("device"):
            weights = tff.learning.models.ModelWeights((kernel, bias), ())
            state = fed_eval().set_model_weights(fed_eval().initialize(), weights)
            metrics = fed_eval().next(state, shard).metrics
        metrics = metrics["client_work"]["eval"]["current_round_metrics"]
        assert metrics["num_examples"] == len(y)
        np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=1e-6)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
