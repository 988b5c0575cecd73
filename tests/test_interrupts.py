"""Ctrl-C at a script while it is still loading: one line, 130, whatever is being imported."""

import ast
import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = sorted(
    path for path in (ROOT / "experiments").glob("*.py") if "__main__" in path.read_text()
)
# As libraries do that catch everything while they are imported.
_SWALLOWS = """
import time
print("here", flush=True)
try:
    time.sleep(60)
except BaseException:
    pass
raise ImportError("half loaded")
"""
_ENDS_IN_ORDER = """
import sys, time
from tff_fedlabel import command_line

def command():
    import importing_is_over
    try:
        print("here", flush=True)
        time.sleep(60)
    finally:
        print("ended", flush=True)

sys.exit(command_line.run_command(sys.argv, lambda: None, command))
"""


def interrupted(arguments, folder):
    """(exit code, output, errors) of a Python that is interrupted once it has said "here".

    The signal reaches all its processes, as from a terminal.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
        start_new_session=True,
    )
    assert process.stdout.readline() == "here\n", process.communicate()
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize(
    "module,script,arguments",
    [
        ("numpy", "run_tff.py", ["--help"]),  # What is needed to know the flags.
        ("pandas", "export.py", ["run", "out"]),
        ("tensorflow", "check_gpu.py", []),  # Its standard error is filtered meanwhile.
    ],
)
def test_while_something_is_imported(module, script, arguments, tmp_path):
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text(_SWALLOWS)
    found = interrupted([ROOT / "experiments" / script, *arguments], tmp_path)
    assert found == (130, "", f"{script}: interrupted\n")


def test_once_everything_is_imported_it_ends_in_order(tmp_path):
    (tmp_path / "importing_is_over.py").touch()
    (tmp_path / "script.py").write_text(_ENDS_IN_ORDER)
    found = interrupted([tmp_path / "script.py"], tmp_path)
    assert found == (130, "ended\n", "script.py: interrupted\n")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_import_nothing_slow_before(path):
    """Only `run_command` takes care of Ctrl-C, so what comes before it must be short."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    others = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    known = {"absl.flags", "tff_fedlabel.command_line", "tff_fedlabel.cli", "grids.settings"}
    assert others <= known


def test_the_command_line_itself_imports_nothing_slow():
    code = (
        f"import sys; sys.path.append({str(ROOT / 'experiments')!r})\n"
        "from grids import settings; from tff_fedlabel import cli, command_line\n"
        "print({'numpy', 'pandas', 'tensorflow', 'jax'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr
