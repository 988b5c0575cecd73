"""Methods in files that TFF_FEDLABEL_METHODS names, and what `register` refuses."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from tff_fedlabel import _own_methods, _parameters, algorithms

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[2] / "experiments"
METHOD = """\
    from __future__ import annotations

    import dataclasses

    from tff_fedlabel import algorithms
    import {beside}


    @dataclasses.dataclass(frozen=True)
    class Config:
        '''Parameters.

        Attributes:
          warmth: How warm it is.
        '''

        warmth: float | None = 1.5
        seed: int = 0


    METHOD = algorithms.register(algorithms.Method("{name}", Config, {beside}.client_update))
"""


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    monkeypatch.setattr(algorithms, "METHODS", dict(algorithms.METHODS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(_own_methods, "_folders", [])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("_own_methods_", "beside_")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    """`write(name)` -> the file of a method of that name, which needs another file beside it."""

    def write(name, beside=None):
        beside = beside or f"beside_{name}"
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{beside}.py").write_text("def client_update(setup, client): ...\n")
        path = folder / "mine.py"
        path.write_text(textwrap.dedent(METHOD).format(name=name, beside=beside))
        return path

    return write


@pytest.fixture
def load(monkeypatch):
    def load(*paths):
        monkeypatch.setenv(_own_methods.VARIABLE, os.pathsep.join(map(str, paths)))
        _own_methods.load()

    return load


def command(script, files, *flags):
    return subprocess.run(
        [sys.executable, str(EXPERIMENTS / script), *flags],
        capture_output=True,
        text=True,
        env={**os.environ, _own_methods.VARIABLE: files},
        timeout=60,
    )


def test_every_command_knows_them(write):
    """They are not run as scripts, so that the last lines of such a file do nothing."""
    files = [write("warm"), write("warmer")]
    with files[1].open("a") as file:
        file.write("\nif __name__ == '__main__':\n    raise SystemExit(3)\n")
    paths = os.pathsep.join(map(str, files)) + os.pathsep
    for script in ("run_tff.py", "compare.py"):
        result = command(script, paths, "--help")
        assert result.returncode == 0, result.stderr
        assert "parameters of warm and warmer:\n  --warmth " in result.stdout
        assert "how warm it is [1.5]" in result.stdout


def test_the_script_that_is_running_registers_its_method_itself(write, load, monkeypatch):
    path = write("hot")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", os.path.relpath(path), raising=False)
    load(path)
    assert "hot" not in algorithms.METHODS


@pytest.mark.parametrize(
    "content,words",
    [
        (None, r"^TFF_FEDLABEL_METHODS names .*mine\.py, which is no file\.$"),
        ("import nothing_of_that_name", "mine.py, which fails: ModuleNotFoundError: No module"),
        ("def client_update(:", "mine.py, which fails: SyntaxError"),
        ("raise ValueError('one\\ntwo')", r"which fails: ValueError: one two\.$"),
        ("raise SystemExit(4)", r"which fails: SystemExit: 4\.$"),
        (
            "from tff_fedlabel import algorithms\n"
            "m = algorithms.METHODS['fedavg']\n"
            "algorithms.register(algorithms.Method('fedavg', m.config_class, m.client_update))",
            "ValueError: a method named fedavg already exists",
        ),
        (
            "import sys\nfrom tff_fedlabel import cli\nsys.exit(cli.main(sys.argv))",
            r"mine\.py, which runs a command; it should do so under `if __name__",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named(content, words, tmp_path, load):
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(_own_methods.MethodFileError, match=words):
        load(path)
    _own_methods.check_not_loading()


def test_other_endings_and_unknown_homes_are_refused(tmp_path, load):
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(_own_methods.MethodFileError, match=r"mine\.txt, which is not called \.py"):
        load(tmp_path / "mine.txt")
    with pytest.raises(_own_methods.MethodFileError, match="~nobody/mine.py, which is no file"):
        load("~nobody/mine.py")


def test_no_file_gets_what_lies_beside_another(write, load):
    first, second = write("cold", beside="beside_both"), write("colder", beside="beside_both")
    with pytest.raises(
        _own_methods.MethodFileError, match=r"has beside_both\.py beside it, as .*cold has"
    ):
        load(first, second)


@pytest.mark.parametrize("script,flags", [("run_tff.py", ()), ("plots.py", (".",))])
def test_on_the_command_line_it_is_one_line(script, flags, tmp_path):
    """Also where it shows only while a command works."""
    result = command(script, str(tmp_path / "none.py"), *flags)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.endswith("none.py, which is no file.")


def with_fields(name="mine", **fields):
    made = [(field, kind, default) for field, (kind, default) in fields.items()]
    made.append(("seed", int, 0))
    config_class = dataclasses.make_dataclass("Mine", made, frozen=True)
    return algorithms.Method(name, config_class, lambda setup, client: None)


def test_a_parameter_has_one_kind_in_all_methods():
    """Its flag is the same for all; threshold is a float in FedLabel, num_helpers an int."""
    for name, kind, default in (("threshold", int, 3), ("num_helpers", float, 0.5)):
        with pytest.raises(ValueError, match=f"^Mine.{name} of the method mine must be "):
            algorithms.register(with_fields(**{name: (kind, default)}))
    algorithms.register(with_fields(threshold=(float, 1)))


def test_no_method_is_called_all():
    with pytest.raises(ValueError, match="^a method cannot be called all"):
        algorithms.register(with_fields("all"))


@pytest.mark.parametrize(
    "annotation,default,kind",
    [
        (float, 1, float),
        ("float", 1, float),
        ("float | None", None, float),
        ("typing.Optional[float]", None, float),
        ("Optional[int]", None, int),
        ("int | float", 0.5, float),
        ("Confidence", "variance", str),
        (bool, True, bool),
    ],
)
def test_a_parameter_is_of_the_kind_that_it_is_annotated_with(annotation, default, kind):
    method = with_fields(warmth=(annotation, default))
    assert _parameters.of(method.config_class)["warmth"].kind is kind


def test_an_unknown_method_may_be_one_that_was_not_named():
    from tff_fedlabel import training

    with pytest.raises(ValueError, match="^algorithm 'mine' is unknown.* TFF_FEDLABEL_METHODS"):
        training.make_config("digits", "mine")
