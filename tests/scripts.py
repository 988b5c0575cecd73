"""Runs commands without a process of their own."""

import contextlib
import io
import sys

import pytest
from absl import flags

from tff_fedlabel import command_line


def run_main(main, *argv):
    """What a process whose `main` gets this command line ends with: (exit code, output, errors)."""
    before = set(flags.FLAGS)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(map(str, argv)))
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(sys.argv)
        finally:
            for name in set(flags.FLAGS) - before:
                delattr(flags.FLAGS, name)
    return code, out.getvalue(), err.getvalue()


def run_script(module, command, *arguments):
    """The same for a script of `experiments`.

    Args:
      module: The script, imported; its `define_flags` defines the flags, its `ARGUMENTS`, if there
        are any, names the arguments that are no flags.
      command: Its function that runs once the flags are known to be right.
      *arguments: The command line without the program.
    """

    def main(argv):
        names = getattr(module, "ARGUMENTS", "")
        return command_line.run_command(argv, module.define_flags, command, arguments=names)

    return run_main(main, module.__file__, *arguments)
