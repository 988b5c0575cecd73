"""The command that draws a partition."""

import subprocess
import sys

import show_partition
from scripts import run_script


def test_picture_of_digits(tmp_path):
    code, output, errors = run_script(
        show_partition,
        show_partition.show,
        *["--num_clients=4", "--alpha=inf", f"--output={tmp_path / 'p.png'}"],
    )
    assert code == 0, errors
    assert output.startswith("4 clients, 1436 of 1439 images used")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_name_is_one_line_and_exit_2():
    code, _, errors = run_script(show_partition, show_partition.show, "--dataset=digit")
    assert code == 2
    assert "did you mean digits?" in errors
    assert errors.count("\n") == 1, errors


def test_a_folder_is_no_picture(tmp_path):
    code, _, errors = run_script(show_partition, show_partition.show, "--output", tmp_path)
    assert code == 2
    (line,) = errors.splitlines()
    assert "is a folder, not a file" in line


def test_a_wrong_flag_is_one_line_and_exit_2():
    """As a user sees it."""
    result = subprocess.run(
        [sys.executable, show_partition.__file__, "--alfa=1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
