"""compare.py: the table against NumPy, accounting, search, failures, what is not run again."""

import compare
import numpy as np
import pandas as pd
import pytest
from grids import accounting
from scripts import run_script

from tff_fedlabel import training

SMALL = ("--rounds", "8", "--eval_every", "2")


def accuracy_of(cell, round_num):
    """Some accuracy that depends on everything that makes a cell."""
    config = cell.config
    rng = np.random.default_rng(
        [
            round_num,
            config.seed,
            int(100 * config.alpha),
            int(100 * config.labeled_fraction),
            len(config.algorithm),
        ]
    )
    return round(0.4 + 0.2 * rng.random() + 0.1 * (config.algorithm == "fedlabel"), 4)


def evaluated(cell):
    config = cell.config
    return [
        accuracy_of(cell, r) if r % config.eval_every == 0 else None
        for r in range(1, config.rounds + 1)
    ]


def test_the_table_is_mean_and_deviation_over_seeds(tmp_path, fake_pool):
    fake_pool.accuracies = staticmethod(evaluated)
    arguments = [
        *("--algorithms", "fedlabel,fedavg,fedprox", "--seeds", "0,1,2", "--alphas", ".1,1"),
        *("--labeled_fractions", ".05,.2", "--include_all_labels", "--output_dir", tmp_path),
        *SMALL,
    ]
    code, out, err = run_script(compare, compare.compare, *arguments)
    assert code == 0, err
    runs = pd.read_csv(tmp_path / "digits_one_pass_runs.csv")
    assert len(runs) == 5 * 2 * 2 * 3
    # A quarter of 4 evaluations is the last one, round 8.
    expected = {}
    for name, where, algorithm, label in (
        ("Supervised, fully labelled", 1.0, "fedavg", "fedavg (100%)"),
        ("Supervised, fully labelled", 1.0, "fedprox", "fedprox (100%)"),
        ("Supervised, partially labelled", None, "fedavg", "fedavg"),
        ("Supervised, partially labelled", None, "fedprox", "fedprox"),
        ("Semi-supervised, partially labelled", None, "fedlabel", "fedlabel"),
    ):
        for fraction in (0.05, 0.2):
            for alpha in (0.1, 1.0):
                values = []
                for seed in range(3):
                    kept = fraction if where is None else where
                    config = training.make_config(
                        "digits", algorithm, alpha=alpha, labeled_fraction=kept, seed=seed
                    )
                    values.append(accuracy_of(type("Cell", (), {"config": config}), 8))
                expected[name, label, fraction, alpha] = values
    table = pd.read_csv(tmp_path / "digits_one_pass_table.csv")
    assert len(table) == len(expected)
    for row in table.itertuples():
        values = expected[row.group, row.row, row.labeled_fraction, row.alpha]
        np.testing.assert_allclose(row.mean, np.mean(values), rtol=1e-5)
        np.testing.assert_allclose(row.deviation, np.std(values, ddof=1), rtol=1e-5)
        assert row.seeds == 3
    check_markdown((tmp_path / "digits_one_pass_table.md").read_text(), expected)
    assert "fedprox (100%)" in out
    curves = pd.read_csv(tmp_path / "digits_one_pass_curves.csv")
    assert sorted(curves["round"].unique()) == [2, 4, 6, 8]
    assert (tmp_path / "digits_one_pass_curves.png").stat().st_size > 10_000
    # With all labels, a run is the same for each labelled fraction: it is run once.
    assert len(fake_pool.last.started) == 3 * 2 * 2 * 3 + 2 * 2 * 3

    code, _, err = run_script(compare, compare.compare, *arguments)
    assert code == 0 and fake_pool.last.started == []
    assert (tmp_path / "digits_one_pass_table.csv").exists()


def check_markdown(text, expected):
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    columns = [(f, a) for f in (0.05, 0.2) for a in (0.1, 1.0)]
    assert lines[0][2:] == [f"{100 * f:g}% labels, alpha {a:g}" for f, a in columns]
    groups = [line[0] for line in lines[2:]]
    assert [g for g in groups if g] == list(dict.fromkeys(key[0] for key in expected))
    shown = {}
    group = ""
    for line in lines[2:]:
        group = line[0] or group
        for column, text in zip(columns, line[2:], strict=True):
            shown[(group, line[1], *column)] = text
    for column in columns:
        means = {k: np.mean(v) for k, v in expected.items() if k[2:] == column}
        full = {k: v for k, v in means.items() if k[0] == "Supervised, fully labelled"}
        part = {k: v for k, v in means.items() if k not in full}
        best = {max(full, key=full.get), max(part, key=part.get)}
        for key, mean in means.items():
            number = f"{100 * mean:.2f}"
            number = f"**{number}**" if key in best else number
            deviation = 100 * np.std(expected[key], ddof=1)
            assert shown[key] == f"{number} ± {deviation:.2f}", key


def test_failed_runs_are_told_at_the_end_and_stop_nothing(tmp_path, fake_pool):
    fake_pool.accuracies = staticmethod(
        lambda cell: None if (cell.config.algorithm, cell.config.seed) == ("fedavg", 1) else [0.5]
    )
    arguments = ("--algorithms", "fedavg,fedprox", "--seeds", "0,1", "--rounds", "1")
    code, out, err = run_script(compare, compare.compare, *arguments, "--output_dir", tmp_path)
    assert code == 1
    lines = err.splitlines()
    assert lines[-2] == "1 run failed:"
    assert lines[-1] == "  fedavg-alpha_1-labeled_fraction_0.2-seed_1: it broke"
    assert "(1 of 2 seeds)" in out and "**50.00** ± 0.00" in out
    fake_pool.accuracies = staticmethod(lambda cell: [0.7])
    code, out, _ = run_script(compare, compare.compare, *arguments, "--output_dir", tmp_path)
    assert code == 0 and "seeds)" not in out
    assert fake_pool.last.started == ["fedavg-alpha_1-labeled_fraction_0.2-seed_1"]
    assert "**60.00** ± 14.14" in out


def test_the_searched_value_is_that_of_the_best_validation_accuracy(tmp_path, fake_pool):
    best = {"fedavg": 0.1, "fedlabel": 0.2}

    def accuracies(cell):
        config = cell.config
        return [0.9 - abs(config.lr - best[config.algorithm])] * config.rounds

    fake_pool.accuracies = staticmethod(accuracies)
    code, out, err = run_script(
        *(compare, compare.compare, "--algorithms", "fedavg,fedlabel", "--search", "lr=.05,.1,.2"),
        *("--search_rounds", "2", "--rounds", "4", "--seeds", "0,1", "--output_dir", tmp_path),
        *("--accounting", "equal_steps", "--name", "mine", "--results_dir", tmp_path / "results"),
    )
    assert code == 0, err
    runs = pd.read_csv(tmp_path / "results" / "mine_equal_steps_runs.csv")
    assert runs.groupby("row")["lr"].unique().apply(list).to_dict() == {
        "fedavg": [0.1],
        "fedlabel": [0.2],
    }
    assert set(runs["rounds"]) == {4}
    # As many steps: 5 labelled and 5 unlabelled ones, or 10 labelled ones.
    assert runs.groupby("row")["tau"].unique().apply(list).to_dict() == {
        "fedavg": [10],
        "fedlabel": [5],
    }
    found = pd.read_csv(tmp_path / "results" / "mine_equal_steps_search.csv")
    assert found[found["chosen"]].set_index("row")["lr"].to_dict() == best
    # .2 is at the edge for FedLabel, so .4 was tried.
    assert sorted(found[found["row"] == "fedlabel"]["lr"]) == [0.05, 0.1, 0.2, 0.4]
    assert "by a search on validation images" in out
    assert len(list(tmp_path.glob("trials/*"))) == 3 + 4 and len(list(tmp_path.glob("runs/*"))) == 4


def test_a_row_whose_search_failed_is_not_run(tmp_path, fake_pool):
    fake_pool.accuracies = staticmethod(
        lambda cell: None if cell.config.lr == 0.2 else [0.5] * cell.config.rounds
    )
    code, out, err = run_script(
        *(compare, compare.compare, "--algorithms", "fedavg", "--search", "lr=.1,.2"),
        *("--search_rounds", "2", "--rounds", "4", "--output_dir", tmp_path),
    )
    assert code == 1 and not out
    assert err.splitlines()[-1] == (
        "  row fedavg, labeled_fraction 0.2, alpha 1.0: not run, for a trial of its search failed"
    )
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    "algorithm,choices,kind,all_labels,wanted",
    [
        ("fedavg", {}, "one_pass", False, {}),
        ("fedavg", {}, "equal_steps", False, {"tau": 7}),
        ("fedavg", {}, "one_pass", True, {"tau": 7}),
        ("fedavg", {}, "equal_steps", True, {"tau": 7}),
        ("fedprox", {"tau": "epoch", "tau_unlabeled": "epoch"}, "one_pass", False, {}),
        ("fedprox", {"tau": "epoch", "tau_unlabeled": "epoch"}, "one_pass", True, {}),
        ("fedlabel", {}, "one_pass", False, {}),
        ("fedlabel", {}, "equal_steps", False, {}),
    ],
)
def test_accounting(algorithm, choices, kind, all_labels, wanted):
    config = training.make_config("digits", algorithm, **{"tau": 3, "tau_unlabeled": 4, **choices})
    assert accounting.steps(config, kind, all_labels) == wanted


def test_epochs_cannot_be_added_up():
    config = training.make_config("digits", "fedavg", tau="epoch")
    with pytest.raises(ValueError, match="tau and tau_unlabeled must be numbers"):
        accounting.steps(config, "equal_steps", False)


@pytest.mark.parametrize(
    "flags,words",
    [
        ([], ["--output_dir is required"]),
        (["--output_dir", "X", "--algorithms", "fedlable"], ["did you mean fedlabel"]),
        (["--output_dir", "X", "--accounting", "one"], ["accounting", "one_pass"]),
        (["--output_dir", "X", "--alphas", ".1,much"], ["--alphas must be numbers", "much"]),
        (["--output_dir", "X", "--alphas", "0"], ["alpha", "0.01"]),
        (["--output_dir", "X", "--seeds", "1.5"], ["--seeds must be whole numbers"]),
        (["--output_dir", "X", "--jobs", "0"], ["jobs", "0"]),
        (["--output_dir", "X", "--jobs", "10000"], ["--jobs must be 1 to"]),
        (["--output_dir", "X", "--search", "lr"], ["--search must be like"]),
        (["--output_dir", "X", "--search", "lrr=.1"], ["did you mean lr"]),
        (["--output_dir", "X", "--search", "lr=fast"], ["lr", "fast"]),
        (["--output_dir", "X", "--search", "lr=-1"], ["lr must be", "-1"]),
        (
            ["--output_dir", "X", "--algorithms", "fedavg", "--threshold", ".5"],
            ["--threshold is not a parameter of fedavg"],
        ),
        (["--output_dir", "X", "--rouns", "3"], ["rouns"]),
        (["--output_dir", "X", "--tau", "many"], ["tau"]),
        (["--output_dir", "/proc/nothing"], ["/proc/nothing"]),
    ],
)
def test_wrong_usage_is_one_line_before_anything_runs(flags, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [] if "--algorithms" in flags else ["--algorithms", "fedlabel,fedavg"]
    code, out, err = run_script(compare, compare.compare, *flags, *given)
    assert code == 2, err
    assert not out and len(err.splitlines()) == 1
    for word in words:
        assert word in err
    assert not list(tmp_path.glob("X/runs"))


def test_a_directory_of_other_choices_is_refused(tmp_path, fake_pool):
    flags = ("--algorithms", "fedavg", "--rounds", "1", "--output_dir", tmp_path)
    fake_pool.accuracies = staticmethod(lambda cell: [0.5])
    assert run_script(compare, compare.compare, *flags)[0] == 0
    code, _, err = run_script(compare, compare.compare, *flags, "--width", "8")
    assert code == 2 and "width is 16 there and 8 here" in err
    code, _, err = run_script(compare, compare.compare, *flags[:-4], "--output_dir", tmp_path)
    assert code == 0, err  # more rounds: the run goes on
    assert len(fake_pool.last.started) == 1


def test_parameters_go_to_the_methods_that_have_them(tmp_path, fake_pool):
    fake_pool.accuracies = staticmethod(lambda cell: [0.5])
    code, _, err = run_script(
        *(compare, compare.compare, "--algorithms", "fedavg,fedlabel", "--rounds", "1"),
        *("--threshold", ".7", "--seed", "3", "--output_dir", tmp_path),
    )
    assert code == 0, err
    runs = {
        p.parent.name: training.stored_choices(p.parent)
        for p in tmp_path.glob("runs/*/config.json")
    }
    assert {c["seed"] for c in runs.values()} == {3}
    thresholds = {c["algorithm"]: c.get("threshold") for c in runs.values()}
    assert thresholds == {"fedavg": None, "fedlabel": 0.7}


def test_the_help_has_its_own_flags_first_and_then_those_of_a_run():
    from grids import settings
    from scripts import run_main

    from tff_fedlabel import command_line

    def main(argv):
        return command_line.run_command(
            argv, compare.define_flags, compare.compare, settings.EPILOGUE
        )

    code, out, _ = run_main(main, compare.__file__, "--help")
    assert code == 0
    own, passed_on = out.split("\ntask and data:\n")
    for flag in ("--algorithms", "--accounting", "--seeds", "--jobs", "--output_dir"):
        assert f"\n  {flag} " in own
    for flag in ("--rounds", "--num_clients", "--threshold", "--runtime"):
        assert f"\n  {flag} " in passed_on
    assert "--resume" not in out and "--algorithm " not in out
    assert "the same command continues" in passed_on
