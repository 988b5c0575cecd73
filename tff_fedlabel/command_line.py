"""What the scripts share of the command line: flags, help, one-line messages, exit codes.

Nothing heavy is imported before the flags are known to be right, so a typing error answers at
once. Exit codes: 0 done, 1 failure, 2 wrong usage, 130 and 143 stopped by SIGINT and SIGTERM.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

from absl import flags

from tff_fedlabel import _own_methods

FLAGS = flags.FLAGS
_INTERNAL = ("probe",)  # by which scripts call themselves
flags.disclaim_key_flags()  # absl files a flag that is defined here under the script that asks.


class UsageError(ValueError):
    """What the user asked for makes no sense; exit code 2."""


def define_verbose(heading: str) -> None:
    """Defines --verbose, which `run_command` does for a script that has not.

    Args:
      heading: Under which it stands in the help; absl's name of a module.
    """
    text = "show TensorFlow's log and the traceback of a failure"
    flags.DEFINE_bool("verbose", False, text, module_name=heading)


def define_overwrite() -> None:
    """Defines --overwrite of the scripts that write where the user says."""
    flags.DEFINE_bool("overwrite", False, "replace what an earlier call has written there")


def define_flags_of_model() -> None:
    """Defines the flags of the scripts that read the model of a run."""
    flags.DEFINE_bool("best", False, "the round with the best validation accuracy, not the last")
    flags.DEFINE_string("data_dir", None, "where the data set lies; for runs of older versions")


def check_output(flag: str, path: str | os.PathLike, folder: bool = True) -> None:
    """Makes the folder for results before the work for them begins.

    Args:
      flag: The flag that names it.
      path: The folder, or a file in it.
      folder: Whether `path` is the folder.

    Raises:
      UsageError: Nothing can be written there.
    """
    parent = os.fspath(path) if folder else os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(parent, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if os.path.isfile(parent) else error.strerror
        text = f"--{flag} {path} cannot be written to ({reason}); choose another"
        raise UsageError(text) from error
    if not folder and os.path.isdir(path):
        raise UsageError(f"--{flag} {path} is a folder, not a file; choose another name")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"--{flag} {path}: {parent} cannot be written to; choose another")


def run_command(
    argv: Sequence[str],
    define: Callable[[], Sequence[str] | None],
    command: Callable[..., int],
    epilogue: str = "",
    arguments: str = "",
) -> int:
    """Parses `argv` with the flags that `define` adds, then runs `command`.

    Args:
      argv: With the program's name first.
      define: Defines the flags. It returns the headings under which it has filed them, as
        `module_name`, in the order of the help; None for one list.
      command: Takes the arguments that are no flags; returns the exit code.
      epilogue: A line for the end of the help.
      arguments: The names of these arguments, "RUN_DIR OUT"; with "..." at the end, the last may be
        given several times. Flags may stand before and after them.

    Returns:
      The exit code. What goes wrong is told in one line on stderr.
    """
    _own_methods.check_not_loading()
    with _interrupts_at_once():
        try:
            return _run(argv, define, command, epilogue, arguments)
        except KeyboardInterrupt:
            return _complain("interrupted", 130)


def _run(argv, define, command, epilogue, arguments) -> int:
    # absl files the flags of a script under its name.
    module = sys.argv[0] if define.__module__ == "__main__" else define.__module__
    try:
        headings = define() or (module,)
    except _own_methods.MethodFileError as error:
        return _complain(str(error), 2)
    if "verbose" not in FLAGS:
        define_verbose(headings[-1])
    try:
        if {"--help", "-help", "--helpshort", "-h", "-helpshort"} & set(argv[1:]):
            print(_help(argv[0], headings, epilogue, arguments))
            return 0
        FLAGS.set_gnu_getopt(True)
        _, *given = FLAGS(list(argv))
        wrong = _wrong_number(given, arguments)
        if wrong:
            return _complain(wrong, 2)
    except UnicodeError:
        return _complain("--flagfile names a file that is not text", 2)
    except flags.Error as error:
        text = str(error).removeprefix("ERROR:: ")
        return _complain(f"{text} (--helpshort lists the flags)", 2)
    if FLAGS.verbose:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    try:
        return command(*given)
    except Exception as error:  # noqa: BLE001 (a user gets one line, whatever happened)
        if FLAGS.verbose:
            traceback.print_exc()
        return _complain(*_explain(error))


def _wrong_number(given: Sequence[str], arguments: str) -> str | None:
    """What is wrong with the number of arguments, if anything."""
    names = arguments.split()
    if len(given) < len(names):
        return f"needs {arguments}, got {' '.join(given) or 'nothing'} (--helpshort explains)"
    if len(given) > len(names) and not arguments.endswith("..."):
        return f"unexpected argument {given[len(names)]!r}; flags start with --"
    return None


def _explain(error: Exception) -> tuple[str, int]:
    """The line that tells a user what went wrong, and the exit code."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UsageError | _own_methods.MethodFileError):
        return text, 2

    from tff_fedlabel import runtime, training
    from tff_fedlabel.datasets import sources

    if isinstance(error, training.Interrupted):
        return text, 128 + error.signal_number
    if isinstance(error, training.RunDirectoryError | training.ConfigError):
        return text, 2
    if isinstance(error, sources.UnusableFilesError):  # A line for each file.
        return str(error), 1
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
    print(f"{_program()}: {text}", file=sys.stderr)
    return code


def _program() -> str:
    return os.path.basename(sys.argv[0]) or "tff_fedlabel"


def _help(program: str, headings: Sequence[str], epilogue: str, arguments: str) -> str:
    lines = [f"usage: {program} {arguments}{' ' if arguments else ''}[--flag value ...]", ""]
    by_heading = FLAGS.flags_by_module_dict()
    groups = [[f for f in by_heading[name] if f.name not in _INTERNAL] for name in headings]
    width = max(len(flag.name) for flags_of_group in groups for flag in flags_of_group) + 4
    for heading, flags_of_group in zip(headings, groups, strict=True):
        if len(headings) > 1:
            lines.append(f"{heading}:")
        for flag in flags_of_group:
            shown = ",".join(flag.default) if isinstance(flag.default, list) else flag.default
            default = "" if shown in (None, False) else f" [{shown}]"
            first, *others = f"{flag.help}{default}".splitlines()
            lines.append(f"  --{flag.name:<{width}}{first}")
            lines += [" " * (width + 4) + other for other in others]
        lines.append("")
    if epilogue:
        lines.append(epilogue)
    lines.append("--flagfile FILE reads flags from a file; experiments/flagfiles has one per task.")
    return "\n".join(lines)


@contextlib.contextmanager
def _interrupts_at_once() -> Iterator[None]:
    """Inside, Ctrl-C while the program is still loading ends it with one line.

    An exception would not do there: libraries that are being imported turn it into another one, or
    have callbacks that print it and go on. Nothing has begun yet that would have to be ended in
    order. Later Ctrl-C is a `KeyboardInterrupt` as ever.
    """
    before = signal.getsignal(signal.SIGINT)
    is_usual = before is signal.default_int_handler  # Else it is ignored, or somebody else's.
    is_main = threading.current_thread() is threading.main_thread()  # It alone gets signals.
    stderr = _copy_of_stderr() if is_usual and is_main else None
    if stderr is None:
        yield
        return

    def interrupted(number, frame):
        if not _is_loading(frame):
            raise KeyboardInterrupt
        os.write(stderr, f"{_program()}: interrupted\n".encode())
        os._exit(128 + number)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(stderr)


def _copy_of_stderr() -> int | None:
    """A copy, since standard error leads elsewhere while TensorFlow is imported; None if closed."""
    try:
        return os.dup(2)
    except OSError:
        return None


def _is_loading(frame) -> bool:
    """Whether TensorFlow Federated, or something before it, is being imported in a frame."""
    federated = sys.modules.get("tensorflow_federated")
    spec = getattr(federated, "__spec__", None)
    if federated is not None and not getattr(spec, "_initializing", False):
        return False
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
