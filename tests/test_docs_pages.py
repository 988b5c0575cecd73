"""The code on the pages about TFF pipelines and differential privacy runs, on small data."""

import pathlib
import re

import numpy as np
import pandas as pd

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"


def code_of(page, **replaced):
    """The page's Python, with the texts in `replaced`, each of which it must have."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL))
    for old, new in replaced.items():
        assert old in code, old
        code = code.replace(old, new)
    return compile(code, str(DOCS / page), "exec")


def test_pipeline_page(tmp_path, capsys):
    rng = np.random.default_rng(0)

    def images(n):
        return rng.integers(0, 256, (n, 8, 8, 1)).astype(np.uint8)

    people = np.array(["ann", "bob", "cy"])
    names = {
        "x": images(36),
        "y": rng.integers(0, 10, 36),
        "client_ids": np.repeat(people, 12),
        "labeled": np.tile([True, False, False], 12),
        "test_x": images(15),
        "test_y": rng.integers(0, 10, 15),
        "test_client_ids": np.repeat(people, 5),
    }
    small = {
        "runs/program": str(tmp_path),
        "rounds=100": "rounds=2",
        "clients=5": "clients=2",
        "clients(5,": "clients(2,",
        "range(20)": "range(2)",
        "_steps=10": "_steps=1",
        "batch_size=32": "batch_size=4",
    }
    exec(code_of("tff-pipeline.md", **small), names)
    assert list(pd.read_csv(tmp_path / "rounds.csv")["key"]) == [1, 2]
    evaluated = pd.read_csv(tmp_path / "evaluations.csv")
    assert list(evaluated["model_metrics/num_examples"]) == [15]
    printed = capsys.readouterr().out
    assert "accuracy" in printed and "fedlabel" in printed
    assert len(names["found"]["fedlabel"]["accuracy"]) == len(people)


def test_privacy_page(tmp_path, capsys):
    small = {
        "rounds=60, num": "rounds=1, width=4, tau=1, tau_unlabeled=1, batch_size=8,"
        " strong_augment='none', num",
        "runs/private": str(tmp_path / "run"),
    }
    names = {}
    exec(code_of("differential-privacy.md", **small), names)
    first, *table = capsys.readouterr().out.splitlines()
    assert "user-level; noise multiplier 4" in first
    assert float(first.split()[0]) == names["summary"]["dp_epsilon"] > 0
    epsilons = [float(line.split()[1]) for line in table]
    assert len(epsilons) == 3 and epsilons == sorted(epsilons, reverse=True)
