"""The script whose workers read their clients' files."""

import importlib.util
import pathlib

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_fedlabel import runtime
from tff_fedlabel.datasets import federated, partition, sources
from tff_fedlabel.runtime import _worker

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "experiments" / "data_on_workers.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("data_on_workers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_memory(number, batch_size):
    source = sources.load("digits", seed=0)
    parts = partition.partition(source.train.y, number, alpha=1.0, seed=0)
    data = federated.from_source(source.train, parts, 0.3, 0, num_classes=10)
    return [
        data.client_dataset(
            client, 0, labeled_steps=None, unlabeled_steps=None, batch_size=batch_size
        )
        for client in data.client_ids
    ]


def test_a_round_from_files_is_the_round_from_memory(script, tmp_path, local_runtime):
    script.write_demo(tmp_path / "clients", 4, 0)
    assert len(list((tmp_path / "clients").iterdir())) == 8
    process = script.build_process(0.1, 0)
    next_round = script.reading(process, str(tmp_path / "clients"), 16)
    ids = script.client_ids(4)
    with tff.framework.get_context_stack().install(local_runtime.context):
        before = process.initialize()
        expected = process.next(before, in_memory(4, 16))
        weights = process.get_model_weights(expected.state).trainable
    workers = []
    try:
        for _ in range(2):
            workers.append(_worker.Worker())
            workers[-1].wait_until_ready(30)
        addresses = [f"127.0.0.1:{worker.port}" for worker in workers]
        with runtime.use("workers", addresses=addresses):
            actual = next_round(before, ids)
            for a, e in zip(
                process.get_model_weights(actual.state).trainable, weights, strict=True
            ):
                np.testing.assert_allclose(a, e, atol=1e-5, rtol=0)
            with pytest.raises(runtime.ComputationError, match="client_9999.*No such file"):
                next_round(before, [ids[0], "client_9999"])
    finally:
        for worker in workers:
            worker.close()
    moved = zip(weights, before.global_model_weights.trainable, strict=True)
    assert max(np.abs(a - b).max() for a, b in moved) > 1e-4
    assert actual.metrics["client_work"]["train"]["images_used"] > 400


def test_a_cohort_lists_the_same_number_of_each_workers_clients(script):
    ids = script.client_ids(12)
    chosen = script.cohort(np.random.default_rng(0), ids, 3, 2)
    assert len(set(chosen)) == 6
    assert [ids.index(client) // 4 for client in chosen] == [0, 0, 1, 1, 2, 2]
