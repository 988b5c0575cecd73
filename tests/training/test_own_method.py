"""The own method of the documentation, run as its reader would run it."""

import pathlib
import re
import subprocess
import sys

import pandas as pd

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "own-method.md"


def test_the_own_method_trains(tmp_path, small_flags):
    page = PAGE.read_text()
    code = re.search(r"```python\n(.*?)```", page, re.S)[1]
    command = re.search(r"python my_method.py (.*)", page)[1].split()
    (tmp_path / "my_method.py").write_text(code)
    flags = [*command, *small_flags, "--rounds", "2", "--output_dir", str(tmp_path / "run")]
    result = subprocess.run(
        [sys.executable, str(tmp_path / "my_method.py"), *flags],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert (metrics["entropy_loss"] > 0).all() and len(metrics) == 2
