"""The commands on the page about experiments, and the flag files of comparisons, are right."""

import pathlib
import re
import shlex

import ablate
import compare
import pandas as pd
import pytest
from scripts import run_script

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLAGFILES = sorted((ROOT / "experiments/flagfiles/comparisons").glob("*.flags"))
# FedAvg takes as many steps as FedLabel in both of its phases.
STEPS = {"fashion_mnist_equal_steps": 18, "digits": 10}
COMMANDS = {"compare.py": (compare, compare.compare), "ablate.py": (ablate, ablate.ablate)}


def commands():
    """The words of each command line of the page."""
    page = (ROOT / "docs/experiments.md").read_text()
    for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


def test_every_command_has_an_example_that_is_there():
    scripts = {words[2].removeprefix("experiments/") for words in commands()}
    assert scripts == {*COMMANDS, "cost.py", "plots.py", "methods_table.py"}
    assert all((ROOT / words[2]).exists() for words in commands())


@pytest.mark.parametrize(
    "words", [w for w in commands() if pathlib.Path(w[2]).name in COMMANDS], ids=" ".join
)
def test_examples_run(words, tmp_path, fake_pool):
    text = re.sub(r"runs/\w+", str(tmp_path), shlex.join(words[3:])).replace("--jobs 2", "")
    code, out, err = run_script(*COMMANDS[pathlib.Path(words[2]).name], *shlex.split(text))
    assert code == 0, err
    assert fake_pool.last.started and list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("path", FLAGFILES, ids=lambda path: path.stem)
def test_comparisons_of_flag_files_run(path, tmp_path, fake_pool):
    code, _, err = run_script(
        *(compare, compare.compare, "--flagfile", path, "--output_dir", tmp_path)
    )
    assert code == 0, err
    (runs,) = tmp_path.glob("*_runs.csv")
    rows = pd.read_csv(runs)
    if path.stem in STEPS:
        assert set(rows[rows["row"] == "fedavg"]["tau"]) == {STEPS[path.stem]}
