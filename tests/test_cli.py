"""Wrong usage: one line, exit code 2, before anything heavy is loaded or written."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "experiments" / "run_tff.py"


def command(*flags, cwd=None):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
    )


def check_usage_error(result, *words):
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not result.stdout
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--rouns", "3"], ["rouns", "rounds"]),
        (["--rounds", "many"], ["rounds", "many"]),
        (["digits"], ["digits", "--"]),
        (["--flagfile", "/nowhere.flags"], ["/nowhere.flags"]),
    ],
)
def test_flags_that_do_not_parse(flags, words, tmp_path):
    check_usage_error(command(*flags, cwd=tmp_path), *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--task", "cifar"], ["cifar10"]),
        (["--output_dir", "/proc/nothing/here"], ["/proc/nothing/here"]),
        (["--resume"], ["--output_dir"]),
    ],
)
def test_values_that_make_no_run(flags, words, tmp_path):
    check_usage_error(command(*flags, cwd=tmp_path), *words)
    assert not list(tmp_path.iterdir())


def test_flag_file_that_is_not_text(tmp_path):
    (tmp_path / "bad.flags").write_bytes(b"--task=\xff\xfe")
    check_usage_error(command("--flagfile", "bad.flags", cwd=tmp_path), "not text")


def test_help_can_be_read(tmp_path):
    result = command("--helpshort", cwd=tmp_path)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) < 50
    assert any("--task" in line and "digits" in line for line in lines)
    assert any("--clients_per_round" in line for line in lines)


def test_missing_data_is_told_in_one_line(tmp_path):
    """Nothing can be downloaded here: the loader must say what to put where."""
    result = command(
        "--task",
        "cifar100",
        "--data_dir",
        str(tmp_path / "data"),
        "--output_dir",
        "run",
        cwd=tmp_path,
    )
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert str(tmp_path / "data") in result.stderr and "cifar100" in result.stderr
