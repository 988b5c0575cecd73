"""Wrong usage and failures: one line, the right exit code, nothing written."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags

from tff_fedlabel import algorithms, cli, runtime, training

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


def check_one_line(out, err, *words):
    assert len(err.splitlines()) == 1, err
    assert not out
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--rouns", "3"], ["rouns", "rounds"]),
        (["--rounds", "many"], ["rounds", "many"]),
        (["digits"], ["digits", "--"]),
        (["--flagfile", "/nowhere.flags"], ["/nowhere.flags"]),
        (["--resume"], ["--output_dir"]),
        (["--runtime", "local", "--deterministic"], ["--deterministic", "--runtime device"]),
    ],
)
def test_flags_that_do_not_parse_or_go_together(flags, words, tmp_path):
    """As a user sees it, and before anything heavy is loaded."""
    result = command(*flags, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    check_one_line(result.stdout, result.stderr, *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--task", "cifar"], ["cifar10"]),
        (["--output_dir", "/proc/nothing/here"], ["/proc/nothing/here"]),
        (["--runtime", "locale"], ["did you mean local"]),
        (["--runtime", "locale", "--require_gpu"], ["--require_gpu needs --runtime device"]),
        (["--runtime", "local", "--max_concurrent_clients", "2"], ["device, not local"]),
        (["--runtime", "local", "--simulate_secure_aggregation"], ["device, not local"]),
        (["--runtime", "local", "--workers", "a:1"], ["--workers needs --runtime workers"]),
        (["--workers", "a:1"], ["--workers needs --runtime workers, not auto"]),
        (["--runtime", "workers"], ["needs --workers host:port"]),
        (["--runtime", "workers", "--workers", "a:1", "--require_gpu"], ["--runtime device"]),
        (["--require_gpu", "--workers", "a:1"], ["--workers needs", "not device"]),
        (["--max_concurrent_clients", "0"], ["max_concurrent_clients is 0"]),
        (["--max_concurrent_clients", "few"], ["max_concurrent_clients", "few"]),
        (["--runtime", "workers", "--workers", "nowhere"], ["nowhere"]),
        (["--runtime", "workers", "--workers="], ["address"]),
    ],
)
def test_values_that_make_no_run(flags, words, tmp_path, monkeypatch, main, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(*flags) == 2
    check_one_line(*capfd.readouterr(), *words)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def calls(monkeypatch):
    """The calls of `training.run`, which does nothing."""
    found = []

    def run(config, output_dir, **options):
        found.append((options["runtime"], options["runtime_options"]))
        raise training.CheckpointError("enough")

    monkeypatch.setattr(training, "run", run)
    return found


@pytest.mark.parametrize(
    "flags,stored,called",
    [
        ([], None, ("auto", {})),
        (["--runtime", "local"], None, ("local", {})),
        (["--runtime", "device"], None, ("device", {})),
        (["--deterministic"], None, ("device", {"deterministic": True})),
        (
            ["--simulate_secure_aggregation"],
            None,
            ("device", {"simulate_secure_aggregation": True}),
        ),
        (
            ["--require_gpu", "--max_concurrent_clients", "3"],
            None,
            ("device", {"require_gpu": True, "max_concurrent_clients": 3}),
        ),
        (
            ["--runtime", "workers", "--workers", "a:1,b:2"],
            None,
            ("workers", {"addresses": ["a:1", "b:2"]}),
        ),
        ([], {"runtime": "local"}, ("local", {})),
        (["--runtime", "device"], {"runtime": "local"}, ("device", {})),
        (["--deterministic"], {"runtime": "local"}, ("device", {"deterministic": True})),
        (["--nodeterministic"], {"runtime": "device"}, ("device", {"deterministic": False})),
        # The addresses are as they were, or new ones.
        ([], {"runtime": "workers"}, ("workers", {})),
        (["--workers", "c:3"], {"runtime": "workers"}, ("workers", {"addresses": ["c:3"]})),
    ],
)
def test_runtime_flags_reach_the_run(flags, stored, called, tmp_path, main, calls):
    if stored:
        content = {"task": "digits", "runtimes": [{"from_round": 0, **stored}]}
        (tmp_path / "config.json").write_text(json.dumps(content))
        flags = [*flags, "--resume"]
    assert main("--output_dir", str(tmp_path), *flags) == 1
    assert calls == [called]


def test_what_auto_means():
    assert runtime.choose() == "device"


ERRORS = [name for name in runtime.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("name", ERRORS)
def test_runtime_that_fails_is_told_in_one_line(name, main, capfd, monkeypatch):
    def run(*_, **__):
        raise getattr(runtime, name)("it is\ngone")

    monkeypatch.setattr(training, "run", run)
    assert main() == 1
    check_one_line(*capfd.readouterr(), ": it is gone")


def test_flag_file_that_is_not_text(tmp_path, main, capfd):
    (tmp_path / "bad.flags").write_bytes(b"--task=\xff\xfe")
    assert main("--flagfile", str(tmp_path / "bad.flags")) == 2
    check_one_line(*capfd.readouterr(), "not text")


def test_help_can_be_read(tmp_path):
    result = command("--helpshort", cwd=tmp_path)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len([line for line in lines if line.startswith("  --")]) > 0.6 * len(lines)
    assert any("--task" in line and "digits" in line for line in lines)
    assert any("--clients_per_round" in line for line in lines)
    for name in runtime.RUNTIMES:
        assert any("--runtime" in line and name in line and "[auto]" in line for line in lines)


def test_missing_data_is_told_in_one_line(tmp_path, main, capfd):
    """Nothing can be downloaded here: the loader must say what to put where."""
    data, output = tmp_path / "data", tmp_path / "run"
    flags = ("--data_dir", str(data), "--output_dir", str(output), "--runtime", "local")
    assert main("--task", "cifar100", *flags) == 1
    check_one_line(*capfd.readouterr(), str(data), "cifar100")
    assert not output.exists()


HEADINGS = ("task and data", "method", "training", "privacy", "runtime", "output")


def test_help_has_every_flag_once_under_a_heading(main, capsys):
    """The flags are those that absl has; the headings of the methods, those of their classes."""
    before, defined = set(flags.FLAGS), []
    define = cli.define_flags

    def noting():
        headings = define()
        defined.extend(set(flags.FLAGS) - before)
        return headings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "define_flags", noting)
        assert main("--help") == 0
    under, heading = {}, None
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("  --"):
            under.setdefault(line.split()[0][2:], []).append(heading)
        elif line.endswith(":"):
            heading = line[:-1]
    assert sorted(under) == sorted(defined) and len(defined) > 45
    assert all(len(headings) == 1 for headings in under.values()), under
    expected = {
        "alpha": "task and data",
        "algorithm": "method",
        "lr": "training",
        "dp_delta": "privacy",
        "workers": "runtime",
        "resume": "output",
        "verbose": "output",
        "skip_discarded": "parameters of "
        "fedlabel, fedavg_uda, fedprox_uda, fedavg_fixmatch and fedprox_fixmatch",
        "lambda_l1": "parameters of fedmatch",
    }
    assert {name: under[name][0] for name in expected} == expected
    found = list(dict.fromkeys(headings[0] for headings in under.values()))
    assert tuple(found[: len(HEADINGS)]) == HEADINGS
    for name, (heading,) in under.items():
        of_methods = [
            method.name
            for method in algorithms.METHODS.values()
            if name in {field.name for field in dataclasses.fields(method.config_class)}
        ]
        if of_methods and name not in {f.name for f in dataclasses.fields(training.RunConfig)}:
            assert re.findall(r"\w+", heading.removeprefix("parameters of ")) == (
                of_methods if len(of_methods) == 1 else [*of_methods[:-1], "and", of_methods[-1]]
            )


def test_the_help_tells_what_a_parameter_is_in_each_method(main, capsys):
    """And its default there: the classes' own, written here once more."""
    assert main("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "fedlabel: beta in [0, 1]; a pseudo-label is kept if its probability is strictly greater "
        "[0.5]",
        "fedavg_fixmatch and fedprox_fixmatch: tau in [0, 1]; a pseudo-label is kept if its "
        "probability is not below it",
        "--lambda_l1 weight >= 0 of ||psi||_1 [0.0001]",
        '--tsa training signal annealing: "none", "linear", "log" or "exp" [none]',
        "--include_labeled whether labelled images are among the unlabelled ones, too [true]",
    ):
        assert words in text


@pytest.mark.parametrize("there", [None, "empty", "a run"])
def test_resume_where_no_run_is_says_that_one_starts(there, tmp_path, main, calls, capfd):
    run = tmp_path / "run"
    if there:
        run.mkdir()
    if there == "a run":
        (run / "config.json").write_text('{"task": "digits"}')
    assert main("--resume", "--output_dir", str(run)) == 1
    told = [f"starts a new run: {run} holds none"] if there != "a run" else []
    assert capfd.readouterr().err.splitlines() == [*told, "run_tff.py: enough"]
    assert len(calls) == 1
