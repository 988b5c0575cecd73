"""The command line of a grid: what is the same in all its cells, and its axes."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import flags

from tff_fedlabel import cli, command_line  # The rest takes long to import: inside functions.

FLAGS = flags.FLAGS
# Flags of run_tff.py that a grid decides for each cell. Those of which it has lists stay.
_DECIDED = ("algorithm", "output_dir", "resume")
# Choices of which tables have columns.
_AXES = ("seed", "alpha", "labeled_fraction")
# Choices in which methods that are compared cannot differ.
_SAME_FOR_ALL = (*_AXES, "rounds", "num_clients")
# Those that a search cannot be for: of columns, and what `accounting` decides.
_NOT_SEARCHED = (*_AXES, "rounds", "tau", "tau_unlabeled")
HEADING, _RUNS = "what is run", "how it is run"
# Those that are no choices of a run: every cell gets them as they were given.
_NO_CHOICES = (
    *("data_dir", "runtime", "workers", "max_concurrent_clients", "deterministic"),
    *("require_gpu", "simulate_secure_aggregation", "checkpoint_every", "verbose"),
)
EPILOGUE = """\
The flags from task and data on go to every run, as in run_tff.py; a method's own parameter, such
as --threshold, to the methods that have it. A list, such as --alphas, replaces the single value.
Stopped by Ctrl-C or killed, the same command continues; runs that are finished are not run again.
Exit codes: 0 done, 1 some runs failed, 2 wrong usage, 130 and 143 stopped. docs/experiments.md has
examples.
"""


def define_flags(
    axes: Iterable[str] = ("seeds", "alphas", "labeled_fractions"), files: bool = True
) -> list[str]:
    """Defines the flags of grids and, to be passed on, those of run_tff.py.

    Args:
      axes: The choices of which there are lists.
      files: Whether tables and figures can be sent elsewhere, and named.

    Returns:
      The headings of the help; a script's own flags stand under `HEADING`.
    """
    headings = cli.define_flags()
    for name in _DECIDED:
        delattr(FLAGS, name)
    lists = {
        "seeds": "seeds, 0,1,2; default: --seed, which is 0",
        "alphas": "Dirichlet parameters of the partition, .1,1; default: the task's",
        "labeled_fractions": "shares of labelled images, .05,.2; default: the task's",
    }
    for name in axes:
        flags.DEFINE_list(name, None, lists[name], module_name=HEADING)
    text = "values of single methods, before those for all: fedmatch.lr=.01,semifl.server_lr=.5"
    flags.DEFINE_list("by_method", None, text, module_name=HEADING)
    under = {"module_name": _RUNS}
    text = "runs at once, each a process on cores of its own; they divide the cores evenly"
    flags.DEFINE_integer("jobs", 1, text, **under)
    flags.DEFINE_string("output_dir", None, "holds the run directories; required", **under)
    if files:
        text = "where tables and figures go; default: --output_dir"
        flags.DEFINE_string("results_dir", None, text, **under)
        text = "what their files are called; default: the task's name"
        flags.DEFINE_string("name", None, text, **under)
    return [HEADING, _RUNS, *headings]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is the same in all cells.

    Attributes:
      task: The task.
      choices: Choices that were given, parameters of methods among them.
      by_method: Method -> choices that replace them in its runs.
      flags: Further flags for run_tff.py.
      output_dir: The directory of the grid.
      results_dir: Where tables and figures go.
      name: What their files are called.
      seeds: The seeds, at least one.
    """

    task: str
    choices: dict[str, Any]
    by_method: dict[str, dict[str, Any]]
    flags: list[str]
    output_dir: pathlib.Path
    results_dir: pathlib.Path
    name: str
    seeds: list[int]

    def choices_for(self, algorithm: str) -> dict[str, Any]:
        """The choices without the parameters of other methods, and those for it alone."""
        from tff_fedlabel import algorithms

        own = _fields(algorithm)
        others = set().union(*map(_fields, algorithms.METHODS)) - own - _run_fields()
        for_all = {name: value for name, value in self.choices.items() if name not in others}
        return for_all | self.by_method.get(algorithm, {})

    def check_used(self, names: Sequence[str]) -> None:
        """Raises `UsageError` for what none of these methods has, and for values of others."""
        for name in self.by_method:
            if name not in names:
                raise command_line.UsageError(
                    f"--by_method has values of {name}, which is not among {', '.join(names)}"
                )
        used = _fields_of(names)
        for name in self.choices:
            if name not in used:
                raise command_line.UsageError(
                    f"--{name} is not a parameter of {' or '.join(names)}; leave it out"
                )

    def check_searched(self, name: str, names: Sequence[str]) -> None:
        """Raises `UsageError` where a search for a choice would mean nothing."""
        if name in _NOT_SEARCHED:
            raise command_line.UsageError(
                f"--search cannot be for {name}, which rows of a table must have in common"
            )
        if name not in _fields_of(names):
            raise command_line.UsageError(
                f"--search is for {name}, which is not a parameter of {' or '.join(names)}"
            )


@functools.cache
def _run_fields() -> set[str]:
    from tff_fedlabel import training

    return {field.name for field in dataclasses.fields(training.RunConfig)}


def _fields_of(names: Sequence[str]) -> set[str]:
    """The choices that runs of at least one of these methods have."""
    return _run_fields().union(*map(_fields, names))


def _fields(algorithm: str) -> set[str]:
    from tff_fedlabel import algorithms

    return {f.name for f in dataclasses.fields(algorithms.METHODS[algorithm].config_class)}


def read() -> Settings:
    """What the command line says.

    Raises:
      UsageError: A flag is missing or wrong.
    """
    from tff_fedlabel import _validation, runtime, training

    if not FLAGS.output_dir:
        raise command_line.UsageError("--output_dir is required: it holds the run directories")
    name, _ = cli.given_runtime()
    choices = cli.given_choices()
    task = choices.pop("task", FLAGS.task)
    with command_line.wrong_values_are_usage():
        _validation.check_name("runtime", name, ("auto", *runtime.RUNTIMES))
        _validation.check_int("checkpoint_every", FLAGS.checkpoint_every)
        _validation.check_int("jobs", FLAGS.jobs)
        # Whether the methods can use labels_at is checked with each of them.
        made = training.make_config(task, **(_of_runs(choices) | {"labels_at": None}))
    passed = [FLAGS[flag].serialize() for flag in _NO_CHOICES if FLAGS[flag].present]
    output_dir = pathlib.Path(FLAGS.output_dir)
    seeds = numbers("seeds", int) or [choices.get("seed", 0)]
    choices.pop("seed", None)
    return Settings(
        task=made.task,
        choices=choices,
        by_method=_by_method(),
        flags=[flag for flag in passed if flag],
        output_dir=output_dir,
        results_dir=pathlib.Path(_given("results_dir") or output_dir),
        name=_name() or pathlib.Path(made.task_name).stem,
        seeds=seeds,
    )


def _by_method() -> dict[str, dict[str, Any]]:
    """What --by_method says.

    Raises:
      UsageError: It is not of that form, or a method has no such choice.
    """
    from tff_fedlabel import _validation, algorithms

    found: dict[str, dict[str, Any]] = {}
    for item in FLAGS.by_method or []:
        method, _, rest = item.strip().partition(".")
        name, equals, text = rest.partition("=")
        if not equals or not name or not text:
            raise command_line.UsageError(
                f"--by_method must be like fedmatch.lr=.01,semifl.lr=.03, got {item!r}"
            )
        with command_line.wrong_values_are_usage():
            _validation.check_name("by_method", method, algorithms.METHODS)
        value = read_value(name, text)
        if name in _SAME_FOR_ALL:
            raise command_line.UsageError(f"--by_method: {name} is the same for all methods")
        if name not in _run_fields() | _fields(method):
            raise command_line.UsageError(f"--by_method: {method} has no {name}")
        if name in found.setdefault(method, {}):
            raise command_line.UsageError(f"--by_method has two values of {method}.{name}")
        found[method][name] = value
    return found


def _name() -> str | None:
    """What --name says.

    Raises:
      UsageError: It is no name of a file.
    """
    name = _given("name")
    if name and os.path.basename(name) != name:
        raise command_line.UsageError(
            f"--name must be a name, not a path, got {name!r}; --results_dir is the folder"
        )
    return name


def _given(flag: str) -> Any:
    return FLAGS[flag].value if flag in FLAGS else None


def _of_runs(choices: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in choices.items() if name in _run_fields()}


def numbers(flag: str, kind: Callable[[str], Any]) -> list[Any]:
    """The values of a flag that is a list, each once; empty if it was not given.

    Raises:
      UsageError: One of them is no number, or there is none.
    """
    found = []
    if getattr(FLAGS, flag) == []:
        raise command_line.UsageError(f"--{flag} must have a number, or be left out")
    for text in getattr(FLAGS, flag) or []:
        try:
            found.append(kind(text))
        except ValueError:
            wanted = "whole numbers" if kind is int else "numbers"
            raise command_line.UsageError(
                f"--{flag} must be {wanted} separated by commas, got {text!r}"
            ) from None
    return list(dict.fromkeys(found))


def read_value(name: str, text: str) -> Any:
    """A value of a choice from text, as its flag reads it.

    Raises:
      UsageError: There is no such choice, or the text is no value of it.
    """
    from tff_fedlabel import _validation

    known = cli.parameters()
    with command_line.wrong_values_are_usage():
        _validation.check_name("choice", name, known)
    parameter = known[name]
    if parameter.kind is str:
        return parameter.parse(text)
    try:
        if parameter.kind is bool:
            return flags.BooleanParser().parse(text)
        return parameter.kind(text)
    except ValueError:
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}
        raise command_line.UsageError(
            f"{name} must be {wanted[parameter.kind]}, got {text!r}"
        ) from None


def algorithm_names(flag: str = "algorithms") -> list[str]:
    """The methods that a flag names, each once; all of them for "all".

    Raises:
      UsageError: There is no such method.
    """
    from tff_fedlabel import _validation, algorithms

    given = [name.strip() for name in getattr(FLAGS, flag)]
    if given == ["all"]:
        return list(algorithms.METHODS)
    with command_line.wrong_values_are_usage():
        for name in given:
            _validation.check_name(flag, name, algorithms.METHODS)
    if not given:
        raise command_line.UsageError(f"--{flag} must name a method, or be left out")
    return list(dict.fromkeys(given))
