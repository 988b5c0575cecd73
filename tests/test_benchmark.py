"""The table of the benchmark script, and its command line."""

import csv
import pathlib
import subprocess
import sys

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
