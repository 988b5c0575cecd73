"""The command that runs one worker for others to use: see `workers`."""

import ipaddress
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from absl import flags

FLAGS = flags.FLAGS
_USAGE = "the command is: serve --port PORT [--host ADDRESS]"
_HELP = frozenset({"--help", "-help", "--helpshort", "-h", "-helpshort"})
_STARTUP_SECONDS = 60.0
_LOOK_SECONDS = 0.5


def define_flags() -> None:
    """Defines the flags of `main`."""
    flags.DEFINE_integer("port", None, "TCP port to listen on; required")
    flags.DEFINE_string(
        "host",
        "127.0.0.1",
        "address of this machine by which others reach the worker; 0.0.0.0 for all of them. "
        "Loopback always reaches it",
    )
    flags.DEFINE_integer(
        "max_concurrent_computation_calls", 0, "clients computed at once; 0 for no limit"
    )
    flags.DEFINE_string("log_file", None, "file that the worker's output is appended to")
    flags.DEFINE_bool("verbose", False, "show TensorFlow's log and the traceback of a failure")


def main(argv: Sequence[str]) -> int:
    """Runs `serve` and its flags, as given on the command line.

    Returns:
      The exit code: 1 failure, 2 wrong usage, 130 and 143 stopped by SIGINT and SIGTERM. Errors
      are reported in one line on stderr.
    """
    program, *rest = argv
    command = rest.pop(0) if rest and not rest[0].startswith("-") else None
    define_flags()
    if _HELP & set(rest):
        print(_help(program))
        return 0
    try:
        extra = FLAGS([program, *rest])[1:]
    except UnicodeError:
        return _complain("--flagfile names a file that is not text", 2)
    except flags.Error as error:
        return _complain(f"{str(error).removeprefix('ERROR:: ')} (--helpshort lists the flags)", 2)
    if extra:
        return _complain(f"unexpected argument {extra[0]!r}; flags start with --", 2)
    if command != "serve":
        return _complain(f"no command {command!r}; {_USAGE}" if command else _USAGE, 2)
    if FLAGS.verbose:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    return _reported(_serve)


def _help(program: str) -> str:
    lines = [f"usage: {program} serve --port PORT [--flag value ...]", ""]
    ours = FLAGS.flags_by_module_dict()[FLAGS.find_module_defining_flag("port")]
    width = max(len(flag.name) for flag in ours) + 4
    for flag in ours:
        default = "" if flag.default in (None, False) else f" [{flag.default}]"
        lines.append(f"  --{flag.name:<{width}}{flag.help}{default}")
    return "\n".join([*lines, "", "--flagfile FILE reads flags from a file."])


def _reported(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; a failure is reported in one line."""
    try:
        return command()
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except _UsageError as error:
        return _complain(str(error), 2)
    except Exception as error:  # noqa: BLE001 (a user gets one line, whatever happened)
        from tff_fedlabel.runtime._runtime_errors import WorkerError

        if FLAGS.verbose:
            traceback.print_exc()
        text = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, WorkerError):
            text = f"{type(error).__name__}: {text[:500]} (--verbose shows where)"
        return _complain(text, 1)


def _complain(text: str, code: int) -> int:
    print(f"{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr)
    return code


class _UsageError(ValueError):
    """A flag has an invalid value."""


class _Terminated(BaseException):
    """SIGTERM arrived."""


def _serve() -> int:
    host = _checked_flags()
    from tff_fedlabel.runtime import _worker

    def terminate(number, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    limit = FLAGS.max_concurrent_computation_calls
    try:
        worker = _worker.Worker(None, limit, FLAGS.log_file, port=FLAGS.port, open_to=(str(host),))
        try:
            worker.wait_until_ready(_STARTUP_SECONDS)
            if not host.is_loopback:
                print(
                    f"warning: there is no authentication: anyone who reaches {_place(host)} can "
                    "run computations on this machine",
                    file=sys.stderr,
                )
            print(f"worker ready on {_place(host)}", flush=True)
            while True:
                worker.check()  # also guards new addresses
                time.sleep(_LOOK_SECONDS)
        finally:
            worker.close()
    except _Terminated:
        return 128 + signal.SIGTERM


def _checked_flags():
    """Checks the flags' values; returns the host's address."""
    try:
        host = _checked_host(FLAGS.host)
        if FLAGS.port is None:
            raise ValueError("--port is required")
        if not 0 < FLAGS.port < 2**16:
            raise ValueError(f"--port {FLAGS.port} is not between 1 and 65535")
        limit = FLAGS.max_concurrent_computation_calls
        if limit < 0:
            raise ValueError(f"--max_concurrent_computation_calls {limit} is below 0")
        from tff_fedlabel.runtime import local

        local.Options(log_file=FLAGS.log_file)
    except ValueError as error:
        raise _UsageError(str(error)) from error
    return host


def _checked_host(text: str):
    from tff_fedlabel.runtime import _exposure

    try:
        host = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"--host {text!r} is not an IP address") from None
    ours = _exposure.local_addresses()
    known = {ipaddress.ip_address(address) for address in ours}
    if not (host.is_unspecified or host.is_loopback or host in known):
        raise ValueError(f"--host {text} is not an address of this machine: {', '.join(ours)}")
    return host


def _place(host) -> str:
    return f"[{host}]:{FLAGS.port}" if host.version == 6 else f"{host}:{FLAGS.port}"
