"""The trainer's command line: its flags, and what appears on the screen.

The flags are those of a run and of its methods: the fields of `training.RunConfig` and of the
methods' configurations, explained there.
"""

import datetime
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from tff_fedlabel import _parameters, _validation, command_line

FLAGS = flags.FLAGS

# Fields of a run that are no flags: the task names the data set.
_NO_FLAGS = ("task", "algorithm", "source")

# Flag -> the runtime that alone has it, and its option there.
_RUNTIME_FLAGS = {
    "max_concurrent_clients": ("device", "max_concurrent_clients"),
    "deterministic": ("device", "deterministic"),
    "require_gpu": ("device", "require_gpu"),
    "simulate_secure_aggregation": ("device", "simulate_secure_aggregation"),
    "workers": ("workers", "addresses"),
}

# The headings of the help; under `TRAINING` are also the choices of a run that are not listed here.
_DATA, _METHOD, _TRAINING = "task and data", "method", "training"
_PRIVACY, _RUNTIME, _OUTPUT = "privacy", "runtime", "output"
_UNDER = {
    _DATA: "num_clients alpha labeled_fraction partition split image_size",
    _METHOD: "model width strong_augment weak_augment init_from",
    _PRIVACY: "dp_noise_multiplier dp_clipping_norm dp_delta",
    _OUTPUT: "client_accuracy eval_every",
}
_HEADING_OF = {name: heading for heading, names in _UNDER.items() for name in names.split()}

_KINDS = {
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    bool: flags.DEFINE_bool,
}


def _run_parameters() -> dict[str, _parameters.Parameter]:
    from tff_fedlabel.training.config import run_parameters

    return {name: p for name, p in run_parameters().items() if name not in _NO_FLAGS}


def parameters() -> dict[str, _parameters.Parameter]:
    """The choices of a run that are flags, those of all methods among them, by name."""
    from tff_fedlabel.training.config import method_parameters

    of_methods = {name: next(iter(p.values())) for name, p in method_parameters().items()}
    return {**_run_parameters(), **of_methods}


def define_flags() -> list[str]:
    """Defines the flags of `main`. A flag that is not given leaves the choice to the task.

    Returns:
      The headings under which they stand in the help.
    """
    from tff_fedlabel import algorithms, tasks  # Not before Ctrl-C is taken care of.
    from tff_fedlabel.training.config import method_parameters

    flags.DEFINE_string(
        "task",
        "digits",
        f"{_list(tasks.TASKS)}; or the path of your own images, a folder or an .npz file "
        "(docs/own-data.md); digits needs no download",
        module_name=_DATA,
    )
    flags.DEFINE_string(
        "data_dir",
        None,
        "where the data sets lie, or are downloaded to, or your images are kept once read",
        module_name=_DATA,
    )
    flags.DEFINE_string("algorithm", "fedlabel", _list(algorithms.METHODS), module_name=_METHOD)
    for parameter in _run_parameters().values():
        heading = _HEADING_OF.get(parameter.name, _TRAINING)
        _KINDS[parameter.kind](parameter.name, None, _text(parameter), module_name=heading)
    _define_runtime_flags()
    _define_output_flags()
    headings = [_DATA, _METHOD, _TRAINING, _PRIVACY, _RUNTIME, _OUTPUT]
    for name, of_methods in method_parameters().items():
        heading = f"parameters of {_list(of_methods, 'and')}"
        kind = next(iter(of_methods.values())).kind
        _KINDS[kind](name, None, _explanation(of_methods), module_name=heading)
        headings.append(heading)
    return list(dict.fromkeys(headings))


def _define_runtime_flags() -> None:
    under = {"module_name": _RUNTIME}
    flags.DEFINE_string(
        "runtime",
        "auto",
        "auto, local (TFF's C++ worker), device (this process; GPUs) or workers (machines)",
        **under,
    )
    flags.DEFINE_list("workers", None, "workers: host:port,host:port of TFF workers", **under)
    flags.DEFINE_integer(
        "max_concurrent_clients", None, "device: clients computed at once", **under
    )
    for name, text in {
        "deterministic": "device: the same weights each time, on a GPU too",
        "require_gpu": "device: fail where no GPU is visible",
        "simulate_secure_aggregation": "device: compute secure sums, without cryptography",
    }.items():
        flags.DEFINE_bool(name, False, text, **under)


def _define_output_flags() -> None:
    under = {"module_name": _OUTPUT}
    text = "the run directory; default: a new one under runs/"
    flags.DEFINE_string("output_dir", None, text, **under)
    text = "continue the run in --output_dir; if it holds none, a new one starts"
    flags.DEFINE_bool("resume", False, text, **under)
    flags.DEFINE_integer("checkpoint_every", 1, "rounds between checkpoints", **under)
    command_line.define_verbose(_OUTPUT)


def _text(parameter: _parameters.Parameter) -> str:
    """The help of a parameter, and its default."""
    default = str(parameter.default)
    default = default.lower() if parameter.kind is bool else default
    return parameter.help + (f" [{default}]" if parameter.default not in (None, "") else "")


def _explanation(of_methods: dict[str, _parameters.Parameter]) -> str:
    """What methods say of a parameter that they share, and its default in each."""
    methods_with: dict[str, list[str]] = {}
    for method, parameter in of_methods.items():
        methods_with.setdefault(_text(parameter), []).append(method)
    if len(methods_with) == 1:
        return next(iter(methods_with))
    return "\n".join(f"{_list(m, 'and')}: {text}" for text, m in methods_with.items())


def _list(names, conjunction: str = "or") -> str:
    *most, last = names
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv` (with the program's name first); returns the exit code."""
    epilogue = "A flag that is not given takes the task's value, else the one in [ ]."
    return command_line.run_command(argv, define_flags, _train, epilogue)


def _train() -> int:
    if FLAGS.resume and not FLAGS.output_dir:
        raise command_line.UsageError("--resume needs --output_dir, the run to continue")
    runtime_name, runtime_options = given_runtime(FLAGS.output_dir if FLAGS.resume else None)

    from tff_fedlabel import runtime, training

    choices = given_choices()
    if FLAGS["algorithm"].present:
        choices["algorithm"] = FLAGS.algorithm
    if FLAGS.resume:  # What is not said again is as it was.
        choices = {**training.stored_choices(FLAGS.output_dir), **choices}
    with command_line.wrong_values_are_usage():
        config = training.make_config(
            **{"task": FLAGS.task, "algorithm": FLAGS.algorithm, **choices}
        )
        _validation.check_name("runtime", runtime_name, ("auto", *runtime.RUNTIMES))
        _validation.check_int("checkpoint_every", FLAGS.checkpoint_every)
    output_dir = FLAGS.output_dir or _new_directory(config)
    if FLAGS.resume and _holds_nothing(output_dir):
        print(f"starts a new run: {output_dir} holds none", file=sys.stderr)
    terminal = sys.stderr.isatty()
    if terminal:  # For the seconds before there is a progress bar.
        print(f"{output_dir}: loading TensorFlow and the data", file=sys.stderr)
    summary = training.run(
        config,
        output_dir,
        data_dir=FLAGS.data_dir,
        resume=FLAGS.resume,
        runtime=runtime_name,
        runtime_options=runtime_options,
        checkpoint_every=FLAGS.checkpoint_every,
        progress=terminal,
        on_round=None if terminal else functools.partial(_print_round, config.rounds),
    )
    _print_summary(summary, output_dir)
    return 0


def given_choices() -> dict[str, Any]:
    """The choices of a run that the flags name, but for the method."""
    choices = {"task": FLAGS.task} if FLAGS["task"].present else {}
    for name, parameter in parameters().items():
        if getattr(FLAGS, name) is not None:
            choices[name] = parameter.parse(getattr(FLAGS, name))
    return choices


def given_runtime(resumed: str | None = None) -> tuple[str, dict[str, Any]]:
    """The runtime that the flags ask for, and its options.

    Args:
      resumed: The directory of the run that is continued, if one is.

    Raises:
      UsageError: The flags do not go together.
    """
    given = [flag for flag in _RUNTIME_FLAGS if FLAGS[flag].present]
    name, stored = FLAGS.runtime, None
    if resumed is not None:
        from tff_fedlabel import training

        stored = training.stored_runtime(resumed)
    if name == "auto" and any(_RUNTIME_FLAGS[flag][0] == "device" for flag in given):
        name = "device"
    elif name == "auto" and stored:
        name = stored[0]
    for flag in given:
        if _RUNTIME_FLAGS[flag][0] != name:
            raise command_line.UsageError(
                f"--{flag} needs --runtime {_RUNTIME_FLAGS[flag][0]}, not {name}"
            )
    if name == "workers" and "workers" not in given and not (stored and stored[0] == name):
        raise command_line.UsageError("--runtime workers needs --workers host:port,host:port")
    return name, {_RUNTIME_FLAGS[flag][1]: getattr(FLAGS, flag) for flag in given}


def _holds_nothing(path: str) -> bool:
    return not os.path.exists(path) or (os.path.isdir(path) and not os.listdir(path))


def _new_directory(config) -> str:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return os.path.join("runs", f"{config.task_name}-{config.algorithm}-{now}-{os.getpid()}")


def _print_round(rounds: int, done: int, metrics: dict[str, float]) -> None:
    """One line for each evaluation."""
    from tff_fedlabel import _progress

    shown = _progress.headline(metrics)
    if "accuracy" in shown:
        text = ", ".join(f"{name} {value}" for name, value in shown.items())
        print(f"round {done}/{rounds}: {text}, {metrics['seconds']:.2f} s", file=sys.stderr)


def _print_summary(summary: dict[str, Any], output_dir: str) -> None:
    rows = {
        "task": summary["task"],
        "algorithm": summary["algorithm"],
        "model": summary["model"],
        "rounds": summary["rounds"],
        "runtime": summary["runtime"],
        "test accuracy": _four_digits(summary["test_accuracy"]),
        "test loss": _four_digits(summary["test_loss"]),
        "validation accuracy": _four_digits(summary["validation_accuracy"]),
        "seconds per round": f"{summary['seconds_per_round']:.2f}",
        **_of_clients(summary),
        "run directory": output_dir,
    }
    rows.update(_privacy_rows(summary))
    for name, value in rows.items():
        print(f"{name:<20} {value}")


def _privacy_rows(summary: dict[str, Any]) -> dict[str, str]:
    """What a run with noise says of its privacy; no rows without."""
    if "dp_epsilon" not in summary:
        return {}
    return {
        "privacy": f"epsilon {summary['dp_epsilon']:.3g} at delta {summary['dp_delta']:.3g} "
        "(one client replaced, cohorts without replacement, secret)",
        "": f"epsilon {summary['dp_epsilon_poisson']:.3g} (one client added or removed, "
        "Poisson sampling, secret)",
        " ": f"epsilon {summary['dp_epsilon_known_cohorts']:.3g} (one client's data or none, "
        "cohorts known)",
        "  ": "of the model only: the metrics of training are not private",
    }


def _of_clients(summary: dict[str, Any]) -> dict[str, str]:
    """The row about accuracy by client, if it was measured."""
    mean, worst = (summary.get(f"client_accuracy_{name}") for name in ("mean", "worst_tenth"))
    if mean is None:
        return {}
    return {"accuracy by client": f"{mean:.4f} (worst tenth {worst:.4f})"}


def _four_digits(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
