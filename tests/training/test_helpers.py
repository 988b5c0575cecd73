"""The clients that a method chooses as helpers: wrong ones are told, memories cannot be changed."""

import collections

import numpy as np
import pytest
from test_stored_values import Config

from tff_fedlabel import algorithms
from tff_fedlabel.training.memory import ClientMemory

INITIAL = {"a": np.zeros(2, np.float32)}


def memory_of(choose, clients=(4, 7)):
    memory = ClientMemory(INITIAL, choose, "mine")
    rows = np.arange(2 * len(clients), dtype=np.float32).reshape(-1, 2)
    memory.update({"client": np.asarray(clients), "value": {"a": rows}})
    return memory


def helpers(memory):
    data = memory.attach(collections.OrderedDict(), 4, 3)
    return [row["a"].tolist() for row in data["helpers"].as_numpy_iterator()]


WRONG = {
    "unknown": ([99], "99 among them"),
    "negative": ([7, -1], "-1 among them"),
    "text": (["a"], "'a' among them"),
    "letters": ("47", "'47'"),
    "float": ([4.0], "4.0 among them"),
    "bool": ([True], "True among them"),
    "None": (None, "None"),
    "number": (4, "4"),
    "row": (np.array([[4, 7]]), "array.* among them"),
}


@pytest.mark.parametrize("chosen,words", list(WRONG.values()), ids=list(WRONG))
def test_wrong_helpers_name_the_method_and_the_client(chosen, words):
    with pytest.raises(
        algorithms.MethodError,
        match=rf"^choose_helpers of mine must return .* for client 4 in round 3 .* got {words}\.$",
    ):
        helpers(memory_of(lambda memories, client, round_num: chosen))


@pytest.mark.parametrize(
    "choose",
    [list, sorted, set, iter, np.array, lambda known: np.array(known, np.uint8), dict.fromkeys],
)
def test_helpers_may_come_in_any_form(choose):
    memory = memory_of(lambda memories, client, round_num: choose(list(memories)))
    assert helpers(memory) == [[0, 1], [2, 3]]
    assert helpers(memory_of(lambda *_: [])) == []


def test_memories_cannot_be_changed():
    seen = []
    memory = memory_of(lambda memories, client, round_num: seen.append(memories) or [4])
    assert helpers(memory) == [[0, 1]]
    (memories,) = seen
    assert list(memories) == [4, 7] and memories[7]["a"].tolist() == [2, 3]
    for name in ("update", "restore", "attach", "state"):
        assert not hasattr(memories, name)
    with pytest.raises(TypeError):
        memories[4] = INITIAL
    with pytest.raises(ValueError, match="read-only"):
        memories[4]["a"][:] = 9
    memory.restore(memory.state())
    assert helpers(memory) == [[0, 1]]


@pytest.mark.parametrize("wrong", ["output", "helpers"])
def test_the_command_line_tells_it_in_one_line(wrong, main, small_flags, monkeypatch, capsys, tmp_path):  # fmt: skip  # noqa: E501
    import tensorflow as tf

    def client_update(setup, client):
        delta = tuple(tf.zeros_like(w) for w in client.weights)
        output = algorithms.ClientOutput(
            delta, 1.0, setup.model.initialize_metrics_state(), {}, memory=client.memory
        )
        return output if wrong == "helpers" else None

    method = algorithms.Method(
        "mine",
        Config,
        client_update,
        reads_unlabeled=False,
        initial_memory=lambda setup: 0.0,
        choose_helpers=lambda memories, client, round_num: [99],
    )
    monkeypatch.setattr(algorithms, "METHODS", {**algorithms.METHODS, "mine": method})
    run = tmp_path / "run"
    flags = [*small_flags, "--algorithm", "mine", "--rounds", "1", "--output_dir", str(run)]
    assert main(*flags) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    name = "choose_helpers of mine" if wrong == "helpers" else "client_update of mine"
    assert line.startswith(f"run_tff.py: {name} must return")
    assert run.exists() == (wrong == "helpers")
