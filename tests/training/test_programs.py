"""`train_model` with our sources and managers: killed anywhere, it goes on to the same weights."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import small_program
import tensorflow_federated as tff
from weights import assert_weights_equal

from tff_fedlabel import runtime
from tff_fedlabel.training import programs

SCRIPT = pathlib.Path(small_program.__file__)
pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compile_once):
    """The folder of a program that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    small_program.run(folder)
    return folder


def final_weights(folder):
    """The released weights of the last round."""
    manager = tff.program.SavedModelFileReleaseManager(str(folder / "model"))
    state = asyncio.run(manager.get_value(f"training_checkpoint_round_{small_program.ROUNDS}"))
    return state.global_model_weights.trainable


def table(path):
    return pd.read_csv(path, index_col="key")


def test_it_trains_as_a_loop_of_ones_own(whole):
    process = small_program.make_process()
    clients = small_program.make_clients()
    with runtime.use("device"):
        state = process.initialize()
        for round_num in range(small_program.ROUNDS):
            drawn = clients.draw_clients(small_program.CLIENTS_PER_ROUND, round_num, seed=3)
            cohort = clients.cohort(drawn, round_num, **small_program.OPTIONS)
            state = process.next(state, cohort).state
        expected = process.get_model_weights(state).trainable
    assert_weights_equal(final_weights(whole), expected)
    assert np.abs(np.asarray(expected[0])).max() > 0


def test_every_round_and_evaluation_is_released(whole):
    rounds = table(whole / "rounds.csv")
    assert list(rounds.index) == list(range(1, small_program.ROUNDS + 1))
    assert rounds["model_metrics/kept_fraction"].between(0, 1).all()
    evaluations = table(whole / "evaluations.csv")
    assert list(evaluations.index) == [2, 4, 6, 8]
    assert (evaluations["model_metrics/num_examples"] == 30).all()
    assert any((whole / "tensorboard").iterdir())
    assert {path.name for path in (whole / "model").iterdir()} == {
        "release_training_checkpoint_round_8",
    }


def test_killed_and_resumed_it_ends_in_the_same_weights(whole, tmp_path):
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path)],
            stdout=output,
            stderr=subprocess.STDOUT,
            # `small_program` imports nothing else of the tests.
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
        )
        end = time.monotonic() + 300
        while not (tmp_path / "states" / "program_state_3").exists():
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < end, "the moment never came"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    stopped = asyncio.run(small_program.state_manager(tmp_path).get_versions())
    assert 3 <= max(stopped) < small_program.ROUNDS
    small_program.run(tmp_path)
    assert_weights_equal(final_weights(tmp_path), final_weights(whole))
    pd.testing.assert_frame_equal(
        table(tmp_path / "evaluations.csv"), table(whole / "evaluations.csv")
    )
    # TFF saves a round and then releases it; a kill between the two loses its row.
    found, expected = table(tmp_path / "rounds.csv"), table(whole / "rounds.csv")
    assert set(range(max(stopped) + 1, small_program.ROUNDS + 1)) <= set(found.index)
    pd.testing.assert_frame_equal(found, expected.loc[found.index])


class _Slow(tff.program.ReleaseManager):
    def __init__(self):
        self.released = []

    async def release(self, value, key):
        await asyncio.sleep(0.02 / key)
        self.released.append((key, value))


def test_values_are_released_in_the_order_of_the_calls(tmp_path):
    slow, other = _Slow(), _Slow()
    csv = tff.program.CSVFileReleaseManager(str(tmp_path / "some.csv"))
    manager = programs.InOrder(slow, other, csv)

    async def release_at_once():
        await asyncio.gather(*(manager.release({"a": key}, key) for key in range(1, 9)))

    asyncio.run(release_at_once())
    assert slow.released == other.released == [(key, {"a": key}) for key in range(1, 9)]
    assert list(table(tmp_path / "some.csv").index) == list(range(1, 9))


def test_states_are_saved_one_after_the_other(tmp_path):
    manager = programs.ProgramStateManager(str(tmp_path), keep_total=2, keep_first=False)

    async def save_at_once():
        await asyncio.gather(*(manager.save(np.int32(v), version=v) for v in range(8)))
        return await manager.load_latest(np.int32(0)), await manager.get_versions()

    assert asyncio.run(save_at_once()) == ((7, 7), [6, 7])


def evaluation_manager(folder):
    return programs.EvaluationManager(
        source=small_program.make_clients(1, all_labeled=True).evaluation_source(batch_size=4),
        build_process=small_program.fed_eval,
        state_dir=folder,
        metrics_manager=tff.program.CSVFileReleaseManager(str(folder / "evaluations.csv")),
        cohort_size=small_program.CLIENTS,
    )


def test_an_evaluation_that_was_begun_is_done_once(tmp_path):
    """After a kill the round is both taken up again and computed, and evaluated, again."""
    initial = small_program.make_model().initial_weights
    weights = tff.learning.models.ModelWeights(*map(tuple, initial))

    async def begin():
        await evaluation_manager(tmp_path).start_evaluation(4, 1000, weights)

    async def go_on():
        manager = evaluation_manager(tmp_path)
        await manager.resume_from_previous_state()
        await manager.start_evaluation(4, 1000, weights)
        await manager.start_evaluation(6, 1000, weights)
        await manager.wait_for_evaluations_to_finish()

    with runtime.use("device", asynchronous=True):
        asyncio.run(begin())  # The loop ends, and with it the evaluation.
        assert (tmp_path / "evaluation_of_train_round_00004" / "program_state_0").is_dir()
        assert table(tmp_path / "evaluations.csv").empty
        asyncio.run(go_on())
    found = table(tmp_path / "evaluations.csv")
    assert list(found.index) == [4, 6]
    assert (found["model_metrics/num_examples"] == 60).all()
    assert not list((tmp_path / "evaluation_of_train_round_00004").iterdir())


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="needs a release manager"):
        programs.InOrder()
    with pytest.raises(ValueError, match="^managers must be tff.program.ReleaseManagers"):
        programs.InOrder("metrics.csv")
    good = {
        "source": small_program.make_clients().evaluation_source(batch_size=4),
        "build_process": lambda: None,
        "state_dir": tmp_path,
        "metrics_manager": tff.program.LoggingReleaseManager(),
        "cohort_size": 2,
    }
    for name, value in (("source", []), ("metrics_manager", "a.csv"), ("cohort_size", 0)):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            programs.EvaluationManager(**{**good, name: value})
