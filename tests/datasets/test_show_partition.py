"""The command that draws a partition, run as a user runs it."""

import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "show_partition.py"


def _run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300
    )


def test_picture_of_digits(tmp_path):
    result = _run("--num_clients=4", "--alpha=inf", f"--output={tmp_path / 'p.png'}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("4 clients, 1436 of 1439 images used")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_flag_is_one_line_and_exit_2():
    result = _run("--dataset=digit")
    assert result.returncode == 2
    assert "did you mean digits?" in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    result = _run("--alfa=1")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
