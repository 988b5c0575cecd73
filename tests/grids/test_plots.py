"""plots.py draws what the files of runs say."""

import pathlib

import numpy as np
import plots
import pytest
from grids import drawings
from hand_made_runs import config, write_run
from scripts import run_script

from tff_fedlabel import training
from tff_fedlabel.training import partition_table, pictures


@pytest.fixture
def runs(tmp_path):
    """Two methods, two seeds, four rounds; the first knows its partition."""
    rng = np.random.default_rng(0)
    for algorithm in ("fedlabel", "fedavg"):
        for seed in (0, 1):
            more = {}
            if algorithm == "fedlabel":
                more = {"kept_fraction": rng.random(4).round(3).tolist()}
            write_run(
                tmp_path / "grid" / "runs" / f"{algorithm}-{seed}",
                config(algorithm, seed=seed),
                rng.random(4).round(3).tolist(),
                **more,
            )
    table = partition_table.PartitionTable(
        ("a", "b", "c"),
        ("cat", "dog"),
        np.array([[2, 0], [1, 1], [0, 0]]),
        np.array([[0, 4], [3, 3], [4, 0]]),
        np.array([4, 6, 4]),
    )
    table.write(tmp_path / "grid" / "runs" / "fedlabel-0" / "partition.csv")
    return tmp_path / "grid"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    found = []
    write = pictures.save

    def save(picture, path):
        found.append(picture)
        write(picture, path)

    monkeypatch.setattr(pictures, "save", save)
    return found


def accuracies(run_dir):
    return training.StoredRun(run_dir).metrics["test_accuracy"]


def test_everything_is_drawn(runs, tmp_path, drawn):
    code, out, err = run_script(plots, plots.draw, runs, "--output_dir", tmp_path / "out")
    assert code == 0, err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        f"{kind}.png" for kind in ("curves", "bars", "partition", "mismatch", "selection")
    }
    assert len(out.splitlines()) == 5
    # One run stands for all in these.
    of_one = [line for line in out.splitlines() if " (of " in line]
    assert [pathlib.Path(line.split(" (of ")[0]).stem for line in of_one] == [
        "partition",
        "mismatch",
    ]


def test_curves_are_means_over_seeds(runs, tmp_path, drawn):
    drawings.Runs(drawings.find_runs([runs])).curves(tmp_path / "curves.png")
    (axis,) = drawn[0].axes
    assert axis.get_title() == "digits, 20% labels, alpha 1"
    for line in axis.get_lines():
        values = [
            training.StoredRun(runs / "runs" / f"{line.get_label()}-{seed}").metrics[
                "test_accuracy"
            ]
            for seed in (0, 1)
        ]
        np.testing.assert_allclose(line.get_ydata(), np.mean(values, axis=0))
    assert [line.get_label() for line in axis.get_lines()] == ["fedavg", "fedlabel"]


def test_bars_are_the_last_quarter(runs, tmp_path, drawn):
    drawings.Runs(drawings.find_runs([runs])).bars(tmp_path / "bars.png")
    (axis,) = drawn[0].axes
    widths = [bar.get_width() for bar in axis.patches]
    expected = [
        np.mean([accuracies(runs / "runs" / f"{name}-{seed}").iloc[-1] for seed in (0, 1)])
        for name in ("fedavg", "fedlabel")
    ]
    np.testing.assert_allclose(widths, expected)


def test_mismatch_shows_the_shares_of_the_classes(runs, tmp_path, drawn):
    drawings.Runs(drawings.find_runs([runs])).mismatch(tmp_path / "mismatch.png")
    first, second = drawn[0].axes  # c has no labelled images
    assert "client a: labelled to unlabelled 1.00, unlabelled to all" in first.get_title()
    heights = [bar.get_height() for bar in first.patches]
    # labelled, unlabelled, all: 10 of the 18 images are cats.
    np.testing.assert_allclose(heights, [1, 0, 0, 1, 10 / 18, 8 / 18])
    assert "client b: labelled to unlabelled 0.00" in second.get_title()


def test_selection_has_a_panel_for_each_run_that_selects(runs, tmp_path, drawn):
    drawings.Runs(drawings.find_runs([runs])).selection(tmp_path / "selection.png")
    assert len(drawn[0].axes) == 2
    for seed, axis in enumerate(drawn[0].axes):
        (line,) = axis.get_lines()
        metrics = training.StoredRun(runs / "runs" / f"fedlabel-{seed}").metrics
        np.testing.assert_allclose(line.get_ydata(), metrics["kept_fraction"])


def test_labels_tell_what_differs(tmp_path):
    write_run(tmp_path / "a", config(threshold=0.3), [0.1])
    write_run(tmp_path / "b", config(threshold=0.7, seed=1), [0.1])
    runs = drawings.Runs(drawings.find_runs([tmp_path / "a", tmp_path / "b"]))
    assert [runs.label(run) for run in runs.runs] == [
        "fedlabel, threshold 0.3",
        "fedlabel, threshold 0.7",
    ]
    # What methods differ in says nothing about runs of one method.
    write_run(tmp_path / "c", config(algorithm="fedprox"), [0.1])
    runs = drawings.Runs(drawings.find_runs([tmp_path / "a", tmp_path / "c"]))
    assert [runs.label(run) for run in runs.runs] == ["fedlabel", "fedprox"]


@pytest.mark.parametrize(
    "flags,words",
    [
        ([], ["needs RUN_DIR"]),
        (["NOWHERE"], ["NOWHERE holds no run"]),
        (["RUN", "--draw", "pie"], ["draw", "curves"]),
        (["RUN", "--draw", "selection"], ["none of the runs has pseudo-labels"]),
        (["RUN", "--draw", "mismatch"], ["knows the classes"]),
    ],
)
def test_wrong_usage(flags, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "RUN", config("fedavg"), [0.1])
    code, out, err = run_script(plots, plots.draw, *flags)
    assert code == 2 and len(err.splitlines()) == 1, err
    assert all(word in err for word in words)
