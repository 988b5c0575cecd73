"""Runs the scripts of `experiments` without a process of their own."""

import contextlib
import io
import sys

import pytest
from absl import flags

from tff_fedlabel import command_line


def run_script(module, command, *arguments):
    """What `python MODULE.py ARGUMENTS` ends with: (exit code, output, errors).

    Args:
      module: The script, imported; its `define_flags` defines the flags.
      command: Its function that runs once the flags are known to be right.
      *arguments: The command line.
    """
    before = set(flags.FLAGS)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = command_line.run_command(sys.argv, module.define_flags, command)
        finally:
            for name in set(flags.FLAGS) - before:
                delattr(flags.FLAGS, name)
    return code, out.getvalue(), err.getvalue()
