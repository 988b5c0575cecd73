"""The runtime of a run: which one it takes and keeps, and how long its rounds took."""

import contextlib
import json
import types

import pytest

from tff_fedlabel import training
from tff_fedlabel.training.run_directory import RunDirectory


def test_runtimes_whose_rounds_are_computed_again_are_forgotten(tmp_path):
    config = training.make_config("digits")

    def begin(done, *runtime):
        directory = RunDirectory(tmp_path, config, True, *runtime)
        directory.note_start(done)
        directory.close()
        return json.loads((tmp_path / "config.json").read_text())["runtimes"]

    local = {"from_round": 0, "runtime": "local"}
    assert begin(0, "local", {}) == [local]
    assert begin(3, "local", {}) == [local]
    device = {"from_round": 4, "runtime": "device"}
    assert begin(4, "device", {}) == [local, device]
    assert begin(5, "device", {}) == [local, device]
    exact = {"from_round": 6, "runtime": "device", "options": {"deterministic": True}}
    assert begin(6, "device", {"deterministic": True}) == [local, device, exact]
    assert begin(4, "local", {}) == [local]
    workers = {"from_round": 0, "runtime": "workers", "options": {"addresses": ["a:1"]}}
    assert begin(0, "workers", {"addresses": ("a:1",)}) == [workers]
    assert begin(1, "workers", {"addresses": ("a:1",)}) == [workers]
    assert training.stored_runtime(tmp_path) == ("workers", {"addresses": ["a:1"]})
    (tmp_path / "config.json").write_text('{"runtimes": [3]}')
    with pytest.raises(training.RunDirectoryError, match="names no runtime"):
        training.stored_runtime(tmp_path)


@pytest.mark.parametrize(
    "stored,asked,used",
    [
        (None, ("auto", None), ("chosen", {})),
        (("local", {"a": 1, "b": 1}), ("auto", {"b": 2}), ("local", {"a": 1, "b": 2})),
        (("local", {"a": 1}), ("local", None), ("local", {"a": 1})),
        (("local", {"a": 1}), ("device", {"c": 3}), ("device", {"c": 3})),
    ],
)
def test_a_resumed_run_keeps_its_runtime(tmp_path, monkeypatch, stored, asked, used):
    from tff_fedlabel import runtime

    config = training.make_config("digits")
    if stored:
        RunDirectory(tmp_path, config, False, *stored).close()
    seen = []

    def use(name, **options):
        seen.append((name, options))
        raise ValueError("no such runtime")

    monkeypatch.setattr(runtime, "RUNTIMES", {"local": "", "device": ""})
    monkeypatch.setattr(runtime, "choose", lambda: "chosen")
    monkeypatch.setattr(runtime, "use", use)
    with pytest.raises(training.ConfigError, match="no such runtime"):
        training.run(config, tmp_path, resume=True, runtime=asked[0], runtime_options=asked[1])
    assert seen == [used]


def test_a_runtime_that_cannot_be_had_leaves_nothing_behind(tmp_path, monkeypatch):
    from tff_fedlabel import runtime

    output_dir, config = tmp_path / "run", training.make_config("digits")
    with pytest.raises(ValueError, match="runtime 'locl' is unknown .did you mean local"):
        training.run(config, output_dir, runtime="locl")
    with pytest.raises(training.ConfigError, match="did you mean 'log_file'"):
        training.run(config, output_dir, runtime="local", runtime_options={"log_fle": "x"})
    assert not output_dir.exists()

    @contextlib.contextmanager
    def use(name):
        assert output_dir.exists()
        raise runtime.WorkerError(f"{name} did not start")
        yield

    monkeypatch.setattr(runtime, "use", use)
    with pytest.raises(runtime.WorkerError, match="local did not start"):
        training.run(config, output_dir, runtime="local")
    assert not output_dir.exists()


@pytest.mark.parametrize(
    "start, expected",
    [(0, 22 / 5), (3, 5.0), (5, 6.0), (6, 22 / 5)],
)
def test_seconds_per_round_are_those_of_this_process(tmp_path, start, expected):
    """Without its first round, which compiles; of all rounds where it ran none."""
    (tmp_path / "metrics.csv").write_text("round,seconds\n1,50\n2,1\n3,2\n4,9\n5,4\n6,6\n")
    directory = types.SimpleNamespace(path=tmp_path)
    assert RunDirectory.mean_seconds(directory, start) == expected
