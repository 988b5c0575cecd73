"""The table of the benchmark script, and its command line."""

import contextlib
import csv
import os
import pathlib
import subprocess
import sys
import time

import pytest

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1] / "experiments"
HARDWARE = {
    "cpu": "a processor",
    "cores": "2",
    "gpu": "none",
    "tensorflow": "2.14.1",
    "tff": "0.87.0",
    "onednn": "default",
}


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from benchmarks import harness

    return harness


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_is_the_median_of_the_ratios_of_each_turn(harness, tmp_path):
    path = tmp_path / "figures.csv"
    table = harness.Table("round", "python benchmark.py", path, HARDWARE)
    # One slow turn: 8 / 10. The ratio of the medians would be 2 / 4.
    table.add("small", "a", "b", "s", [2, 8, 1], [4, 10, 1], harness.Goal(0.85))
    (row,) = read(path)
    assert (row["median_a"], row["median_b"], row["repeats"]) == ("2", "4", "3")
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == ("0.800", "0.500", "1.000")
    assert (row["goal"], row["met"]) == ("ratio <= 0.85", "yes")
    assert row["cpu"] == "a processor"


def test_a_goal_may_be_about_the_quantity_itself(harness, tmp_path):
    path = tmp_path / "figures.csv"
    table = harness.Table("overhead", "python benchmark.py", path, HARDWARE)
    table.add("small", "a", "b", "ms", [3, 3], [6, 6], harness.Goal(2, of="A"))
    assert read(path)[0]["met"] == "no"


def test_a_figure_measured_again_replaces_the_old_one_and_no_other(harness, tmp_path):
    path = tmp_path / "figures.csv"
    for benchmark, value in (("round", 1), ("memory", 1), ("round", 3)):
        table = harness.Table(benchmark, "python benchmark.py", path, HARDWARE)
        table.add("small", "a", "b", "s", [value], [2])
    assert [(r["benchmark"], r["ratio"]) for r in read(path)] == [
        ("round", "1.500"),
        ("memory", "0.500"),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["figures.csv"]


def test_functions_are_timed_in_turn_after_warming_up(harness):
    calls = []
    seconds = harness.in_turn({name: lambda name=name: calls.append(name) for name in "ab"}, 3)
    assert calls == ["a", "b"] * (len(calls) // 2)
    assert len(calls) > 6
    assert [len(values) for values in seconds.values()] == [3, 3]


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--benchmark", "speed"], ["speed", "client_work"]),
        (["--benchmark", "pfl", "--cores", "0"], ["--cores", "0"]),
        (["--output", "/proc/nothing/here.csv"], ["/proc/nothing/here.csv"]),
        (["--output", __file__], [__file__, "--output"]),
    ],
)
def test_wrong_usage_is_one_line(flags, words):
    result = subprocess.run(
        [sys.executable, str(EXPERIMENTS / "benchmark.py"), *flags],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


def test_cores_are_compared_with_the_share_of_independent_processes(harness, tmp_path, monkeypatch):
    """A round lasts .1 s alone: two processes on two cores have one to show every .05 s."""
    from benchmarks import cores, setup, stacks

    started = []

    @contextlib.contextmanager
    def process(python, script, quick, some, share_cores=False):
        started.append((tuple(some), share_cores))
        yield lambda request: time.sleep(0.06 if len(some) == 2 else 0.1)

    monkeypatch.setattr(stacks, "process", process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 7})
    path = tmp_path / "figures.csv"
    table = harness.Table("cores", "python benchmark.py", path, HARDWARE)
    cores.cores(table, "benchmark.py", setup.Options("device", 3, True, None))
    assert started == [((4,), True), ((4,), False), ((4, 7), True), ((4,), False), ((7,), False)]
    one, two = read(path)
    assert one["size"].endswith(", 1 core") and two["size"].endswith(", 2 cores")
    assert float(one["ratio"]) == pytest.approx(1, abs=0.2)
    assert float(two["ratio"]) == pytest.approx(1.2, abs=0.2)
    assert float(two["median_b"]) == pytest.approx(0.05, abs=0.01)
