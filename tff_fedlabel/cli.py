"""The command line: flags, what appears on the screen, exit codes.

Nothing heavy is imported before the flags are known to be right, so a typing error answers at
once. Exit codes: 0 done, 1 failure, 2 wrong usage, 130 and 143 stopped by SIGINT and SIGTERM.
"""

import contextlib
import datetime
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

from tff_fedlabel import _progress

FLAGS = flags.FLAGS

# Fields of `tasks.RunConfig`. A flag that is not given leaves the choice to the task.
_RUN_FLAGS = {
    "rounds": (int, "communication rounds T"),
    "num_clients": (int, "clients M that the images are dealt out to"),
    "clients_per_round": (int, "clients m in a round"),
    "labeled_fraction": (float, "share of each client's images that keep their label, in (0, 1]"),
    "alpha": (float, "Dirichlet parameter of the partition, 0.01 to inf (IID)"),
    "partition": (str, "client: a class mixture per client; class: shares of each class"),
    "split": (str, "pooled: 80/5/15 of all published images; official: the published test set"),
    "model": (str, "cnn, resnet18, resnet34 or resnet50"),
    "width": (int, "width of the model (64 for ResNets)"),
    "mixed_precision": (str, "float16 or bfloat16: the model computes in it, for fast GPUs"),
    "lr": (float, "learning rate eta of the clients' SGD"),
    "batch_size": (int, "images in a batch"),
    "tau": (str, "labelled steps of a client in a round, or 'epoch': one pass over its images"),
    "tau_unlabeled": (str, "unlabelled steps tau', or 'epoch'"),
    "threshold": (float, "beta in [0, 1]: a pseudo-label is kept above this probability"),
    "consistency_weight": (float, "lambda_0 of the global-local consistency term"),
    "confidence": (str, "variance or entropy"),
    "selection": (str, "adaptive, local or global: which expert labels"),
    "strong_augment": (str, "paper (10 operations at magnitude 1), single (1 at 10) or none"),
    "proximal_strength": (float, "mu of FedProx's term"),
    "server_lr": (float, "learning rate of the server's SGD"),
    "server_momentum": (float, "momentum of the server's SGD"),
    "eval_every": (int, "rounds between evaluations"),
    "seed": (int, "seed of everything"),
}

# Flag -> the runtime that alone has it, and its option there.
_RUNTIME_FLAGS = {
    "max_concurrent_clients": ("device", "max_concurrent_clients"),
    "deterministic": ("device", "deterministic"),
    "require_gpu": ("device", "require_gpu"),
    "workers": ("workers", "addresses"),
}

_INTERNAL = ("probe",)  # by which scripts call themselves

_KINDS = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}


def define_flags() -> None:
    """Defines the flags of `main`."""
    flags.DEFINE_string(
        "task",
        "digits",
        "digits (needs no download), fashion_mnist, emnist, cifar10, cifar100, organamnist or "
        "bloodmnist",
    )
    flags.DEFINE_string("algorithm", "fedlabel", "fedlabel, fedavg or fedprox")
    for name, (kind, text) in _RUN_FLAGS.items():
        _KINDS[kind](name, None, text)
    flags.DEFINE_string("data_dir", None, "where the data sets lie, or are downloaded to")
    flags.DEFINE_string("output_dir", None, "the run directory; default: a new one under runs/")
    flags.DEFINE_string(
        "runtime",
        "auto",
        "auto, local (TFF's C++ worker), device (this process; GPUs) or workers (machines)",
    )
    flags.DEFINE_list("workers", None, "workers: host:port,host:port of TFF workers")
    flags.DEFINE_integer("max_concurrent_clients", None, "device: clients computed at once")
    flags.DEFINE_bool("deterministic", False, "device: the same weights each time, on a GPU too")
    flags.DEFINE_bool("require_gpu", False, "device: fail where no GPU is visible")
    flags.DEFINE_bool("resume", False, "continue the run in --output_dir")
    flags.DEFINE_integer("checkpoint_every", 1, "rounds between checkpoints")
    flags.DEFINE_bool("verbose", False, "show TensorFlow's log and the traceback of a failure")


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv` (with the program's name first); returns the exit code."""
    return run_command(argv, define_flags, _train)


def run_command(argv: Sequence[str], define: Callable[[], None], command: Callable[[], int]) -> int:
    """Parses `argv` with the flags that `define` adds, then runs `command`.

    Returns:
      The exit code. What goes wrong is told in one line on stderr.
    """
    define()
    try:
        if {"--help", "-help", "--helpshort", "-h", "-helpshort"} & set(argv[1:]):
            print(_help(argv[0], define))
            return 0
        rest = FLAGS(list(argv))
        if len(rest) > 1:
            return _complain(f"unexpected argument {rest[1]!r}; flags start with --", 2)
    except UnicodeError:
        return _complain("--flagfile names a file that is not text", 2)
    except flags.Error as error:
        text = str(error).removeprefix("ERROR:: ")
        return _complain(f"{text} (--helpshort lists the flags)", 2)
    if FLAGS.verbose:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    try:
        return command()
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except Exception as error:  # noqa: BLE001 (a user gets one line, whatever happened)
        if FLAGS.verbose:
            traceback.print_exc()
        return _complain(*_explain(error))


def _explain(error: Exception) -> tuple[str, int]:
    """The line that tells a user what went wrong, and the exit code."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UsageError):
        return text, 2

    from tff_fedlabel import runtime, training
    from tff_fedlabel.datasets import sources

    if isinstance(error, training.Interrupted):
        return text, 128 + error.signal_number
    if isinstance(error, training.RunDirectoryError | training.ConfigError):
        return text, 2
    known = (
        training.CheckpointError,
        sources.DataNotFoundError,
        sources.CorruptDataError,
        *_runtime_errors(runtime),
    )
    if isinstance(error, known):
        return text, 1
    return f"{type(error).__name__}: {text[:500]} (--verbose shows where)", 1


def _runtime_errors(runtime) -> tuple[type[Exception], ...]:
    """The exceptions by which a runtime says that it did not start or that it failed."""
    exported = (getattr(runtime, name) for name in runtime.__all__)
    return tuple(e for e in exported if isinstance(e, type) and issubclass(e, RuntimeError))


class UsageError(ValueError):
    """What the user asked for makes no sense; exit code 2."""


@contextlib.contextmanager
def wrong_values_are_usage() -> Iterator[None]:
    """Inside, a `ValueError` that is not about damaged data means wrong usage: exit code 2."""
    try:
        yield
    except ValueError as error:
        from tff_fedlabel.datasets import sources

        if isinstance(error, UsageError | sources.CorruptDataError):
            raise
        raise UsageError(str(error)) from error


def _complain(text: str, code: int) -> int:
    print(f"{os.path.basename(sys.argv[0]) or 'tff_fedlabel'}: {text}", file=sys.stderr)
    return code


def _help(program: str, define: Callable[[], None]) -> str:
    lines = [f"usage: {program} [--flag value ...]", ""]
    # absl files the flags of a script under its name.
    module = sys.argv[0] if define.__module__ == "__main__" else define.__module__
    flags_of_module = FLAGS.flags_by_module_dict()[module]
    ours = [flag for flag in flags_of_module if flag.name not in _INTERNAL]
    width = max(len(flag.name) for flag in ours) + 4
    for flag in ours:
        default = "" if flag.default in (None, False) else f" [{flag.default}]"
        lines.append(f"  --{flag.name:<{width}}{flag.help}{default}")
    lines.append("")
    if define is define_flags:
        lines.append("A flag that is not given takes the task's value.")
    lines.append("--flagfile FILE reads flags from a file; experiments/flagfiles has one per task.")
    return "\n".join(lines)


def _train() -> int:
    if FLAGS.resume and not FLAGS.output_dir:
        raise UsageError("--resume needs --output_dir, the run to continue")
    runtime_name, runtime_options = _runtime()

    from tff_fedlabel import runtime, tasks, training

    choices = {name: getattr(FLAGS, name) for name in _RUN_FLAGS}
    for name in ("tau", "tau_unlabeled"):
        choices[name] = _steps(name, choices[name])
    choices = {name: value for name, value in choices.items() if value is not None}
    for name in ("task", "algorithm"):
        if FLAGS[name].present:
            choices[name] = getattr(FLAGS, name)
    if FLAGS.resume:  # What is not said again is as it was.
        choices = {**training.stored_choices(FLAGS.output_dir), **choices}
    with wrong_values_are_usage():
        config = tasks.make_config(**{"task": FLAGS.task, "algorithm": FLAGS.algorithm, **choices})
        tasks.check_name("runtime", runtime_name, ("auto", *runtime.RUNTIMES))
        tasks.check_count("checkpoint_every", FLAGS.checkpoint_every)
    output_dir = FLAGS.output_dir or _new_directory(config)
    terminal = sys.stderr.isatty()
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


def _runtime() -> tuple[str, dict[str, Any]]:
    """The runtime that the flags ask for, and its options."""
    given = [flag for flag in _RUNTIME_FLAGS if FLAGS[flag].present]
    name, stored = FLAGS.runtime, None
    if FLAGS.resume:
        from tff_fedlabel import training

        stored = training.stored_runtime(FLAGS.output_dir)
    if name == "auto" and any(_RUNTIME_FLAGS[flag][0] == "device" for flag in given):
        name = "device"
    elif name == "auto" and stored:
        name = stored[0]
    for flag in given:
        if _RUNTIME_FLAGS[flag][0] != name:
            raise UsageError(f"--{flag} needs --runtime {_RUNTIME_FLAGS[flag][0]}, not {name}")
    if name == "workers" and "workers" not in given and not (stored and stored[0] == name):
        raise UsageError("--runtime workers needs --workers host:port,host:port")
    return name, {_RUNTIME_FLAGS[flag][1]: getattr(FLAGS, flag) for flag in given}


def _steps(name: str, value: str | None) -> int | str | None:
    if value is None or value == "epoch":
        return value
    try:
        return int(value)
    except ValueError:
        raise UsageError(
            f"{name} must be a whole number of 1 or more, or 'epoch', got {value!r}"
        ) from None


def _new_directory(config) -> str:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return os.path.join("runs", f"{config.task}-{config.algorithm}-{now}-{os.getpid()}")


def _print_round(rounds: int, done: int, metrics: dict[str, float]) -> None:
    """One line for each evaluation."""
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
        "run directory": output_dir,
    }
    for name, value in rows.items():
        print(f"{name:<20} {value}")


def _four_digits(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
