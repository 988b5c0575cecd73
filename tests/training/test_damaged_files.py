"""Files of a run directory that are damaged: one line that names the file and says what to do."""

import json
import os
import shutil

import pandas as pd
import pytest
from small_run import SMALL

from tff_fedlabel import training

pytestmark = pytest.mark.usefixtures("build_once")


def config_of(rounds):
    return training.make_config("digits", "fedavg", **{**SMALL, "rounds": rounds})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "finished"
    training.run(config_of(2), path)
    return path


@pytest.fixture
def run_directory(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def resume(path, rounds):
    return training.run(config_of(rounds), path, resume=True)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"rounds": "x"}', '{"rounds": null}'])
def test_summary(run_directory, content):
    (run_directory / "summary.json").write_text(content)
    with pytest.raises(training.RunDirectoryError, match=r"^\S*summary.json is damaged .*; delete"):
        resume(run_directory, 2)
    (run_directory / "summary.json").unlink()
    summary = resume(run_directory, 2)
    assert summary == json.loads((run_directory / "summary.json").read_text())
    assert summary["rounds_done"] == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a,b\n1,2\n",
        b"\xff\xfe\x00\x81",
        b"round,seconds\n1,2\n",
        b"round,seconds,validation_accuracy\n1,2,x\n",
        b"round,seconds,validation_accuracy\n1.0,2,0.5\n2.0,2,0.5\n",
    ],
)
def test_metrics(run_directory, content):
    (run_directory / "metrics.csv").write_bytes(content)
    with pytest.raises(training.RunDirectoryError, match="metrics.csv is damaged") as caught:
        resume(run_directory, 3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", '{"seconds": 1}', '{"round": 2, "seconds": "x"}'])
def test_metrics_of_the_last_round(run_directory, content):
    whole = pd.read_csv(run_directory / "metrics.csv")
    whole[:1].to_csv(run_directory / "metrics.csv", index=False)
    (run_directory / "round.json").write_text(content)
    with pytest.raises(training.RunDirectoryError, match=r"^\S*round.json is damaged .*; delete"):
        resume(run_directory, 3)
    (run_directory / "round.json").unlink()
    assert resume(run_directory, 3)["rounds_done"] == 3


def test_runtimes(run_directory):
    path = run_directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "runtimes": [{"runtime": "device"}]}))
    with pytest.raises(training.RunDirectoryError, match="config.json is damaged .*from_round"):
        resume(run_directory, 3)


def test_a_folder_that_is_read_only(run_directory, monkeypatch):
    """As on a file system that is mounted so; modes alone do not stop an administrator."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    before = {path: path.stat().st_mtime_ns for path in run_directory.rglob("*")}
    with pytest.raises(training.RunDirectoryError) as caught:
        resume(run_directory, 3)
    assert str(caught.value) == (
        f"cannot write to {run_directory} (it is read-only); choose another --output_dir."
    )
    assert {path: path.stat().st_mtime_ns for path in run_directory.rglob("*")} == before
