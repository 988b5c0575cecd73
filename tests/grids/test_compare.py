"""compare.py: the table against NumPy, accounting, search, failures, what is not run again."""

import compare
import numpy as np
import pandas as pd
import pytest
from grids import accounting
from scripts import run_script

from tff_fedlabel import command_line, training

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


def test_groups_are_by_where_the_labels_of_the_runs_are(tmp_path, fake_pool):
    accuracies = {"fedavg": 0.5, "fedlabel": 0.7, "rscfed": 0.6, "semifl": 0.4}
    fake_pool.accuracies = staticmethod(lambda cell: [accuracies[cell.config.algorithm]])
    flags = ("--algorithms", "fedavg,fedlabel,rscfed", "--rounds", "1", "--output_dir", tmp_path)
    code, _, err = run_script(compare, compare.compare, *flags, "--labels_at", "some_clients")
    assert code == 0, err
    runs = pd.read_csv(tmp_path / "digits_one_pass_runs.csv")
    assert set(runs["labels_at"]) == {"some_clients"}
    assert dict(zip(runs["row"], runs["group"], strict=True)) == {
        "fedavg": "Supervised, some clients fully labelled",
        "fedlabel": "Semi-supervised, some clients fully labelled",
        "rscfed": "Semi-supervised, some clients fully labelled",
    }
    only_semifl = ("--algorithms", "semifl", "--rounds", "1", "--output_dir", tmp_path / "semifl")
    code, _, err = run_script(compare, compare.compare, *only_semifl, "--labels_at", "server")
    assert code == 0, err
    # They use the same labels, so that one is the best.
    text = (tmp_path / "digits_one_pass_table.md").read_text()
    assert "**70.00**" in text and text.count("**") == 2


def test_a_run_without_an_accuracy_is_no_seed(tmp_path):
    from grids import tables

    columns = {"group": "g", "row": "r", "labeled_fraction": 0.2, "alpha": 1.0}
    runs = pd.DataFrame(
        [{**columns, "seed": s, "test_accuracy": a} for s, a in enumerate([0.5, 0.7, float("nan")])]
    )
    (found,) = tables.summarize(runs).to_dict("records")
    assert found["seeds"] == 2
    np.testing.assert_allclose([found["mean"], found["deviation"]], [0.6, 0.02**0.5])


def test_runs_that_diverged_are_named_under_the_table(tmp_path, fake_pool):
    fake_pool.accuracies = staticmethod(lambda cell: [0.5, 0.1, 0.1, 0.1])
    flags = ("--algorithms", "fedavg,fedprox", "--rounds", "4", "--output_dir", tmp_path)
    code, out, _ = run_script(compare, compare.compare, *flags)
    assert code == 0 and "Diverged" not in out
    (run,) = tmp_path.glob("runs/fedprox-*")
    metrics = pd.read_csv(run / "metrics.csv")
    # A round in which a client was rejected, one in which all were, one in which none had images.
    metrics = metrics.assign(rejected_clients=[1, 5, 0, 5], images_used=[60, 0, 0, 0])
    metrics.to_csv(run / "metrics.csv", index=False)
    code, out, _ = run_script(compare, compare.compare, *flags)
    assert code == 0
    assert (
        "Diverged, no client's update was finite in some rounds: fedprox (20% labels, alpha 1, "
        "seed 0: 2 rounds)." in out
    )
    runs = pd.read_csv(tmp_path / "digits_one_pass_runs.csv").set_index("row")
    assert runs["lost_rounds"].to_dict() == {"fedavg": 0, "fedprox": 2}


def test_a_row_of_which_no_trial_has_an_accuracy_is_not_run(tmp_path, fake_pool):
    fake_pool.accuracies = staticmethod(lambda cell: [None] * cell.config.rounds)
    code, out, err = run_script(
        *(compare, compare.compare, "--algorithms", "fedavg", "--search", "lr=.1,.2"),
        *("--search_rounds", "2", "--rounds", "4", "--output_dir", tmp_path),
    )
    assert code == 1 and not out
    assert "not run, for no trial of its search has a validation accuracy" in err.splitlines()[-1]
    assert not list(tmp_path.glob("runs/*"))


def test_a_search_goes_as_far_as_a_run_may(tmp_path, fake_pool):
    """1000 is the largest learning rate."""
    fake_pool.accuracies = staticmethod(lambda cell: [0.5] * cell.config.rounds)
    code, _, err = run_script(
        *(compare, compare.compare, "--algorithms", "fedavg", "--search", "lr=600"),
        *("--search_rounds", "1", "--rounds", "2", "--output_dir", tmp_path),
    )
    assert code == 0, err
    found = pd.read_csv(tmp_path / "digits_one_pass_search.csv")
    assert sorted(found["lr"]) == [300, 600]


def test_all_labels_are_at_the_clients(tmp_path, fake_pool):
    """Also of a method that nobody named, which can have values of its own."""
    fake_pool.accuracies = staticmethod(lambda cell: [0.5] * cell.config.rounds)
    code, out, err = run_script(
        *(compare, compare.compare, "--algorithms", "semifl", "--labels_at", "server"),
        *("--include_all_labels", "--by_method", "fedavg.lr=.2,semifl.mixup_weight=0"),
        *("--rounds", "2", "--output_dir", tmp_path),
    )
    assert code == 0, err
    assert "| Supervised, fully labelled | fedavg (100%) | 50.00 |" in out
    runs = pd.read_csv(tmp_path / "digits_one_pass_runs.csv").set_index("row")
    assert runs["labels_at"].to_dict() == {"fedavg (100%)": "every_client", "semifl": "server"}
    assert runs.loc["fedavg (100%)", "lr"] == 0.2


@pytest.mark.parametrize(
    "text,value", [("1", True), ("0", False), ("true", True), ("False", False)]
)
def test_truth_values_are_those_of_the_flags(text, value):
    from grids import settings

    assert settings.read_value("skip_discarded", text) is value
    with pytest.raises(command_line.UsageError, match="^skip_discarded must be true or false"):
        settings.read_value("skip_discarded", "2")


def test_a_damaged_run_is_named_and_stops_no_other(tmp_path, fake_pool):
    def accuracies(cell):
        return [0.5] * (1 if cell.config.algorithm == "fedavg" else 2)  # of two rounds

    fake_pool.accuracies = staticmethod(accuracies)
    flags = ("--algorithms", "fedavg,fedprox", "--rounds", "2", "--output_dir", tmp_path)
    code, out, err = run_script(compare, compare.compare, *flags)
    assert code == 1 and "| fedprox | 50.00 |" in out and "| fedavg | failed |" in out
    assert "metrics.csv is damaged: it ends in round 1 of the 2" in err.splitlines()[-1]
    code, out, err = run_script(compare, compare.compare, *flags)
    assert code == 2 and not out and "metrics.csv is damaged" in err


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
        (["--output_dir", "X", "--by_method", "fedavg.lr"], ["--by_method must be like"]),
        (["--output_dir", "X", "--by_method", "fedavg=.1"], ["--by_method must be like"]),
        (["--output_dir", "X", "--by_method", "fedavgg.lr=.1"], ["did you mean fedavg"]),
        (["--output_dir", "X", "--by_method", "fedprox.lr=.1"], ["fedprox, which is not among"]),
        (["--output_dir", "X", "--by_method", "fedavg.lr=-1"], ["lr must be", "-1"]),
        (["--output_dir", "X", "--by_method", "fedavg.alpha=1"], ["alpha is the same for all"]),
        (
            ["--output_dir", "X", "--by_method", "fedavg.threshold=.5"],
            ["--by_method: fedavg has no threshold"],
        ),
        (
            ["--output_dir", "X", "--by_method", "fedavg.lr=.1,fedavg.lr=.2"],
            ["two values of fedavg.lr"],
        ),
        (["--output_dir", "X", "--search", "seed=0,1"], ["--search cannot be for seed"]),
        (["--output_dir", "X", "--search", "rounds=1,3"], ["--search cannot be for rounds"]),
        (["--output_dir", "X", "--search", "tau=1,3"], ["--search cannot be for tau"]),
        (["--output_dir", "X", "--by_method", "fedavg.rounds=1"], ["rounds is the same for all"]),
        (["--output_dir", "X", "--seeds", ""], ["--seeds must have a number"]),
        (["--output_dir", "X", "--name", "a/b"], ["--name must be a name", "--results_dir"]),
        (["--output_dir", "X", "--results_dir", "file"], ["--results_dir file", "it is a file"]),
        (["--output_dir", "file/X"], ["--output_dir file/X cannot be written to"]),
        (
            ["--output_dir", "X", "--algorithms", "fedavg", "--search", "threshold=.5,.7"],
            ["threshold, which is not a parameter of fedavg"],
        ),
        (["--output_dir", "X", "--rouns", "3"], ["rouns"]),
        (["--output_dir", "X", "--tau", "many"], ["tau"]),
        (["--output_dir", "/proc/nothing"], ["/proc/nothing"]),
    ],
)
def test_wrong_usage_is_one_line_before_anything_runs(flags, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    given = [] if "--algorithms" in flags else ["--algorithms", "fedlabel,fedavg"]
    code, out, err = run_script(compare, compare.compare, *flags, *given)
    assert code == 2, err
    assert not out and len(err.splitlines()) == 1
    for word in words:
        assert word in err
    assert not list(tmp_path.glob("X/runs"))


def test_a_directory_of_other_choices_is_refused(tmp_path, fake_pool):
    flags = ("--algorithms", "fedavg", "--rounds", "1", "--output_dir", tmp_path)
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


def test_values_of_single_methods_come_before_those_for_all(tmp_path, fake_pool):
    fake_pool.accuracies = staticmethod(lambda cell: [0.5] * cell.config.rounds)
    code, _, err = run_script(
        *(compare, compare.compare, "--algorithms", "fedavg,fedprox,fedlabel", "--rounds", "1"),
        *("--lr", ".3", "--by_method", "fedlabel.lr=.4,fedlabel.threshold=.7,fedprox.lr=.5"),
        *("--search", "threshold=.6,.8", "--search_rounds", "1", "--output_dir", tmp_path),
    )
    assert code == 0, err
    stored = [training.stored_choices(p.parent) for p in tmp_path.glob("runs/*/config.json")]
    found = {c["algorithm"]: (c["lr"], c.get("threshold")) for c in stored}
    # A value that was given is not searched for.
    assert found == {"fedavg": (0.3, None), "fedprox": (0.5, None), "fedlabel": (0.4, 0.7)}
    assert not list(tmp_path.glob("trials/*"))


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
