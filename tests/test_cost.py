"""Costs: passes and bytes against counts by hand, the table, the command line."""

import dataclasses
import functools

import cost
import four_methods
import numpy as np
import pandas as pd
import pytest
from costs import passes, subject, table, traffic
from scripts import run_script

from tff_fedlabel import algorithms, augmentation


@pytest.fixture(scope="module", autouse=True)
def cheap_subjects():
    """A method is built once for each model, and its strong view is one that is soon compiled.

    That one, too, multiplies matrices for its draws, which are no passes of the model.
    """
    process, processes = subject.Subject.process, {}

    def process_once(self):
        key = self.method, self.size.shape, self.size.width
        if key not in processes:
            processes[key] = process(self)
        return processes[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject.Subject, "process", process_once)
        patch.setitem(subject.STRONG_AUGMENTS, "single", augmentation.WeakAugment())
        yield


# (forward, backward, batches forward) of one labelled and one unlabelled step, and of the first.
BY_HAND = {
    # One pass for the labels. The two experts, then the student, once for both of its views.
    "fedlabel": ((4, 2, 5), (1, 1, 1), "2P + 2B"),
    "fedavg": ((1, 1, 1), (1, 1, 1), "1B"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_passes_are_those_of_the_algorithm(name):
    step, labeled, symbols = BY_HAND[name]
    found = passes.count(name, round_num=100)
    assert found.step == step and found.labeled == labeled
    assert found.once == (0, 0, 0)
    assert str(found) == symbols


@pytest.fixture
def with_memory(monkeypatch):
    monkeypatch.setitem(algorithms.METHODS, "small_memory", four_methods.WITH_MEMORY)
    return "small_memory"


def weights_bytes(width, shape):
    """Of the CNN: two convolutions with strides of 2, a hidden layer of 128, the logits."""
    height, wide, channels = shape
    flat = (-(-height // 4)) * (-(-wide // 4)) * 2 * width
    first, second = 9 * channels * width + width, 9 * width * 2 * width + 2 * width
    return 4 * (first + second + 128 * flat + 128 + 1290)


@functools.cache
def measured(name):
    """Of the model of `passes.count`."""
    one = subject.Subject(name, subject.Size(4, 1, 1, shape=(8, 8, 1), width=4))
    memory = one.initial_memory()
    helpers = subject.num_helpers(one.method, memory)
    return traffic.measure(one.process(), one.setup.model, memory, helpers)


def test_bytes_are_those_of_weights_state_and_metrics():
    model = weights_bytes(4, (8, 8, 1))
    found = measured("fedavg")
    assert found.model == model
    assert found.down == model + 8  # round number, learning rate
    # The weight twice (in the mean, and to see whether anybody counts); the model's three metrics
    # (two of them int64); labelled loss over images, images used, rejected clients.
    assert found.up == model + 8 + 20 + 16
    assert found.in_models == pytest.approx(2, abs=0.02)


def test_memories_count_where_others_read_them(with_memory):
    model = weights_bytes(4, (8, 8, 1))
    memory = model + 4
    found = measured(with_memory)
    assert found.down == model + 8 + 2 * memory  # two helpers
    assert found.up == model + 8 + 20 + 20 + memory + 4
    assert passes.count(with_memory, 100).step == (1, 1, 1)


def test_a_memory_of_its_own_stays_with_the_client(monkeypatch):
    def update(setup, client):
        output = four_methods.supervised(setup, client)
        return output._replace(memory={"rounds": client.memory["rounds"] + 1.0})

    method = dataclasses.replace(
        four_methods.WITH_MEMORY,
        name="small_own",
        client_update=update,
        choose_helpers=None,
        initial_memory=lambda setup: {"rounds": 0.0},
    )
    monkeypatch.setitem(algorithms.METHODS, "small_own", method)
    assert measured("small_own")[:2] == measured("fedavg")[:2]


def test_the_table_has_the_papers_figures_beside_the_measured_ones():
    count = passes.Passes(*[passes.Count(4.0, 2.0, 5.0)] * 3)
    sent = traffic.Traffic(1100, 900, 1000)
    seconds = {"fedlabel": [1.0, 2.0, 4.0], "fedavg": [0.5, 0.5, 0.5]}
    rows = [table.row(name, count, sent, seconds[name]) for name in seconds]
    text = table.markdown(pd.DataFrame(rows), seconds)
    header, _, fedlabel, fedavg = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
    )
    shown = dict(zip(header, fedlabel, strict=True))
    assert shown["passes a step"] == shown["paper, a step"] == "2P + 2B"
    assert (shown["s per client"], shown["paper, s"]) == ("2.0000", "3.76")
    assert (shown["KB down"], shown["models sent"], shown["paper"]) == ("1.1", "2.00", "2R")
    other = dict(zip(header, fedavg, strict=True))
    assert other["relative"] == f"{np.median([0.5, 0.25, 0.125]):.2f}"
    assert other["paper, relative"] == other["paper, s"] == ""
    assert table.PAPER["fedmatch"][2] / table.PAPER["fedlabel"][2] == pytest.approx(2.99, abs=0.01)


def test_what_the_server_does_beside_the_mean():
    found = [table.at_the_server(method) for method in four_methods.ALL]
    assert found == ["state", "choice of helpers", "training on its labels", "own aggregation"]
    assert table.at_the_server(algorithms.METHODS["fedlabel"]) == "none"


def test_the_command_measures_in_turn(tmp_path, with_memory):
    code, out, err = run_script(
        *(cost, cost.cost, "--algorithms", f"fedavg,{with_memory}"),
        *("--measure", "seconds", "--tau", "1", "--clients", "2", "--turns", "2"),
        *("--batch_size", "4", "--width", "2", "--output_dir", tmp_path),
    )
    assert code == 0, err
    found = pd.read_csv(tmp_path / "cost.csv").set_index("method")
    assert list(found.index) == ["fedavg", with_memory]
    assert (found["seconds_per_client"] > 0).all() and (found["turns"] == 2).all()
    text = (tmp_path / "cost.md").read_text()
    assert "--measure=seconds" in text and str(tmp_path) not in text
    assert f"| {with_memory} |" in out


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--measure", "flops"], ["measure", "passes"]),
        (["--measure", ""], ["--measure must name some of passes"]),
        (["--output_dir", "/proc/nothing"], ["--output_dir /proc/nothing cannot be written to"]),
        (["--algorithms", "fedlable"], ["did you mean fedlabel"]),
        (["--turns", "0"], ["turns", "0"]),
        (["--runtime", "workers"], ["runtime", "device"]),
    ],
)
def test_wrong_usage(flags, words):
    code, out, err = run_script(cost, cost.cost, *flags)
    assert code == 2 and not out and len(err.splitlines()) == 1, err
    assert all(word in err for word in words)
