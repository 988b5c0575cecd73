"""The command that runs one worker for others to use: see `workers`."""

import ipaddress
import signal
import sys
import time
from collections.abc import Sequence

from absl import flags

from tff_fedlabel import cli

FLAGS = flags.FLAGS
_USAGE = "the command is: serve --port PORT [--host ADDRESS]"
_STARTUP_SECONDS = 60.0
_LOOK_SECONDS = 0.5


def define_flags() -> None:
    """Defines the flags of `main`."""
    flags.DEFINE_integer("port", None, "TCP port to listen on; required")
    flags.DEFINE_string(
        "host",
        "127.0.0.1",
        "address of this machine by which others reach the worker; 0.0.0.0 for all of them. "
        "Loopback always does",
    )
    flags.DEFINE_integer(
        "max_concurrent_computation_calls", 0, "clients computed at once; 0 for no limit"
    )
    flags.DEFINE_string("log_file", None, "file that the worker's output is appended to")
    flags.DEFINE_bool("verbose", False, "show TensorFlow's log and the traceback of a failure")


def main(argv: Sequence[str]) -> int:
    """Runs `serve` and its flags, as given on the command line; returns the exit code."""
    program, *rest = argv
    command = rest.pop(0) if rest and not rest[0].startswith("-") else None
    asks_for_help = {"--help", "-help", "--helpshort", "-h", "-helpshort"} & set(rest)

    def run() -> int:
        if command != "serve":
            raise cli.UsageError(f"no command {command!r}; {_USAGE}" if command else _USAGE)
        return _serve()

    return cli.run_command([program, *(["--help"] if asks_for_help else rest)], define_flags, run)


class _Terminated(BaseException):
    """SIGTERM arrived."""


def _serve() -> int:
    with cli.wrong_values_are_usage():
        host = _checked_host(FLAGS.host)
        if FLAGS.port is None:
            raise ValueError("--port is required")
        if not 0 < FLAGS.port < 2**16:
            raise ValueError(f"--port {FLAGS.port} is not between 1 and 65535")
        limit = FLAGS.max_concurrent_computation_calls
        if limit < 0:
            raise ValueError(f"--max_concurrent_computation_calls {limit} is below 0")
        from tff_fedlabel.runtime import _worker, local

        local.validate(log_file=FLAGS.log_file)

    def terminate(number, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        worker = _worker.Worker(None, limit, FLAGS.log_file, port=FLAGS.port, open_to=(str(host),))
        try:
            worker.wait_until_ready(_STARTUP_SECONDS)
            if not host.is_loopback:
                print(
                    f"warning: there is no authentication: whoever reaches {_place(host)} can run "
                    "computations on this machine",
                    file=sys.stderr,
                )
            print(f"worker ready on {_place(host)}", flush=True)
            while True:
                worker.check()  # which also looks for addresses that are new
                time.sleep(_LOOK_SECONDS)
        finally:
            worker.close()
    except _Terminated:
        return 128 + signal.SIGTERM


def _checked_host(text: str):
    from tff_fedlabel.runtime import _exposure

    try:
        host = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"--host {text!r} is not an IP address") from None
    ours = _exposure.local_addresses()
    known = {ipaddress.ip_address(address) for address in ours}
    if not (host.is_unspecified or host.is_loopback or host in known):
        raise ValueError(f"--host {text} is no address of this machine: {', '.join(ours)}")
    return host


def _place(host) -> str:
    return f"[{host}]:{FLAGS.port}" if host.version == 6 else f"{host}:{FLAGS.port}"
