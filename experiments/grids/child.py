"""Runs the trainer's command for a process that may be killed.

  python child.py PARENT CORES LOCK [flag ...]

PARENT is the process that starts this one: when it is gone, for whatever reason, this one gets
SIGTERM, writes its checkpoint and ends. CORES are those to run on, separated by commas. LOCK is an
inherited descriptor that is held until the end, -1 for none.
"""

import ctypes
import os
import pathlib
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1
RUN_TFF = pathlib.Path(__file__).resolve().parents[1] / "run_tff.py"


def main() -> None:
    parent, cores, lock = sys.argv[1:4]
    # First: TensorFlow makes threads for the cores that it sees when it is imported.
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit(128 + signal.SIGTERM)
    if int(lock) >= 0:
        os.set_inheritable(int(lock), False)  # Not for TFF's worker.
    sys.argv = [str(RUN_TFF), *sys.argv[4:]]
    sys.path[0] = str(RUN_TFF.parent)
    runpy.run_path(str(RUN_TFF), run_name="__main__")


if __name__ == "__main__":
    main()
