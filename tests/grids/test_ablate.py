"""ablate.py: what is varied, what runs figures share, tables against NumPy."""

import ablate
import numpy as np
import pandas as pd
import pytest
from grids import ablation
from scripts import run_script


def accuracy_of(config):
    threshold = getattr(config.algorithm_config(), "threshold", 0.0)
    seed = int(1000 * threshold) + config.tau + config.seed
    return round(0.3 + 0.5 * np.random.default_rng(seed).random(), 4)


@pytest.fixture(autouse=True)
def accuracies(fake_pool):
    fake_pool.accuracies = staticmethod(
        lambda cell: [accuracy_of(cell.config)] * cell.config.rounds
    )


def test_tables_are_means_over_seeds_and_figures_share_runs(tmp_path, fake_pool):
    code, out, err = run_script(
        *(ablate, ablate.ablate, "--vary", "threshold", "--vary", "tau=5,10", "--rounds", "2"),
        *("--vary", "selection", "--seeds", "0,1", "--output_dir", tmp_path),
    )
    assert code == 0, err
    # .5 is the default threshold, 5 the task's tau, adaptive the default: one run for each seed.
    assert len(fake_pool.last.started) == 2 * (5 + 2 + 3 - 2)
    runs = pd.read_csv(tmp_path / "digits_threshold.csv")
    assert runs.columns[:3].tolist() == ["line", "threshold", "seed"]
    for row in runs.itertuples():
        expected = np.random.default_rng(int(1000 * row.threshold) + 5 + row.seed).random()
        assert row.test_accuracy == pytest.approx(round(0.3 + 0.5 * expected, 4))
    values = runs[runs["threshold"] == 0.9]["test_accuracy"]
    shown = f"{100 * np.mean(values):.2f} ± {100 * np.std(values, ddof=1):.2f}"
    text = (tmp_path / "digits_threshold.md").read_text()
    assert text.splitlines()[2] == "|  | 0.1 | 0.3 | 0.5 | 0.7 | 0.9 |"
    assert shown in text and shown in out
    for name in ("threshold", "tau", "selection"):
        assert (tmp_path / f"digits_{name}.png").stat().st_size > 5_000


def test_a_second_choice_makes_the_lines(tmp_path, fake_pool):
    code, _, err = run_script(
        *(ablate, ablate.ablate, "--vary", "threshold=.1,.9/strong_augment=single,none"),
        *("--rounds", "1", "--output_dir", tmp_path),
    )
    assert code == 0, err
    runs = pd.read_csv(tmp_path / "digits_threshold_by_strong_augment.csv")
    assert runs["line"].tolist() == [
        *["fedlabel, strong_augment single"] * 2,
        *["fedlabel, strong_augment none"] * 2,
    ]
    assert len(fake_pool.last.started) == 4


def test_methods_without_the_choice_are_left_out(tmp_path, fake_pool):
    code, _, err = run_script(
        *(ablate, ablate.ablate, "--algorithms", "fedlabel,fedavg", "--vary", "threshold=.1"),
        *("--vary", "alpha=.1,1", "--rounds", "1", "--output_dir", tmp_path),
    )
    assert code == 0, err
    assert set(pd.read_csv(tmp_path / "digits_threshold.csv")["line"]) == {"fedlabel"}
    assert set(pd.read_csv(tmp_path / "digits_alpha.csv")["line"]) == {"fedlabel", "fedavg"}


def test_a_failed_run_leaves_a_gap(tmp_path, fake_pool):
    fake_pool.accuracies = staticmethod(lambda cell: [0.5] if cell.config.tau == 5 else None)
    code, out, err = run_script(
        *(ablate, ablate.ablate, "--vary", "tau=5,10", "--rounds", "1", "--output_dir", tmp_path)
    )
    assert code == 1 and "it broke" in err
    assert "| fedlabel | 50.00 | failed |" in out


def test_a_caption_names_what_all_runs_have_in_common(tmp_path, fake_pool):
    flags = ("--vary", "num_clients=10,20", "--vary", "tau=5", "--rounds", "1")
    code, out, err = run_script(ablate, ablate.ablate, *flags, "--output_dir", tmp_path)
    assert code == 0, err
    assert "num_clients, digits, 1 rounds: test" in out
    assert "tau (fig:abloc)" not in out and "tau, digits, 1 rounds, 20 clients: test" in out


def test_seeds_that_failed_are_told(tmp_path, fake_pool):
    fake_pool.accuracies = staticmethod(lambda cell: None if cell.config.seed == 1 else [0.5])
    flags = ("--vary", "tau=5,10", "--rounds", "1", "--seeds", "0,1,2", "--output_dir", tmp_path)
    code, out, _ = run_script(ablate, ablate.ablate, *flags)
    cell = "50.00 ± 0.00 (2 of 3 seeds)"
    assert code == 1 and f"| fedlabel | {cell} | {cell} |" in out
    assert "over 3 seeds, ± their deviation (n - 1)" in out


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--vary", "tau="], ["--vary must be one of", "tau=5,10"]),
        (["--vary", "seed=0,1"], ["--vary cannot vary seed", "--seeds"]),
        (["--vary", "tau=1/tau=2"], ["tau twice"]),
        (["--vary", "tau=1,2", "--vary", "tau=5,10"], ["tau twice", "the same file"]),
        (["--vary", "threshold", "--vary", "threshold=.2"], ["threshold twice"]),
        (["--vary", "treshold=.1"], ["did you mean threshold"]),
        (["--vary", "threshold=2"], ["threshold", "2"]),
        (["--algorithms", "fedavg", "--vary", "threshold"], ["threshold makes no difference"]),
        (["--algorithms", "fedavg", "--vary", "strong_augment=none"], ["makes no difference"]),
    ],
)
def test_wrong_usage(flags, words, tmp_path):
    code, out, err = run_script(ablate, ablate.ablate, *flags, "--output_dir", tmp_path)
    assert code == 2 and not out and len(err.splitlines()) == 1, err
    assert all(word in err for word in words)


def test_the_papers_ablations_are_all_there():
    known = ablation.of_the_paper("single")
    assert list(known) == [
        *("consistency_weight", "tau", "threshold", "confidence", "strong_augment", "selection"),
        *("labeled_fraction", "alpha"),
    ]
    assert all(ablation.fits("fedlabel", one) for one in known.values())
    assert {name for name, one in known.items() if ablation.fits("fedavg", one)} == {
        *("tau", "labeled_fraction", "alpha"),
    }
