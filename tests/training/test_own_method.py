"""The own method of the documentation, run as its reader would run it."""

import pathlib
import re
import runpy

import pandas as pd
import pytest
from scripts import run_main

from tff_fedlabel import algorithms

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "own-method.md"


def as_script(argv):
    """What `uv run my_method.py` does, but for the process."""
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(argv[0], run_name="__main__")
    return ended.value.code


def test_the_own_method_trains(tmp_path, small_flags, monkeypatch):
    # The method is known until the test ends.
    monkeypatch.setattr(algorithms, "METHODS", dict(algorithms.METHODS))
    page = PAGE.read_text()
    code = re.search(r"```python\n(.*?)```", page, re.S)[1]
    command = re.search(r"uv run my_method.py (.*)", page)[1].split()
    (tmp_path / "my_method.py").write_text(code)
    flags = [*command, *small_flags, "--rounds", "2", "--output_dir", str(tmp_path / "run")]
    code, _, errors = run_main(as_script, tmp_path / "my_method.py", *flags)
    assert code == 0, errors
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert (metrics["entropy_loss"] > 0).all() and len(metrics) == 2
