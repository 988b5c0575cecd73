"""Real processes: cores, kills, the lock; what is left of the time."""

import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import compare
import pytest
from grids import child, command, lock, pool, progress
from scripts import run_script
from small_run import SMALL

from tff_fedlabel import command_line, training


def test_cores_are_divided():
    assert pool.share_cores(2, [0, 1, 4, 5, 9]) == [[0, 1], [4, 5, 9]]
    assert pool.share_cores(1, [3, 7]) == [[3, 7]]
    for jobs in (0, 3):
        with pytest.raises(command_line.UsageError, match="--jobs must be 1 to 2"):
            pool.share_cores(jobs, [0, 1])


def test_time_left_follows_each_algorithm():
    estimate = progress.Estimate(jobs=2)
    assert estimate.left({"a": ("fedavg", 10)}) is None
    estimate.note("a", "fedavg", 10, 20.0)  # 2 s a round
    estimate.note("a", "fedavg", 20, 40.0)  # the same cell, later
    estimate.note("b", "fedlabel", 5, 30.0)  # 6 s a round
    estimate.note("c", "fedlabel", 0, 9.0)  # nothing known
    assert estimate.left({}) == 0
    remaining = {"a": ("fedavg", 10), "b": ("fedlabel", 5), "d": ("fedavg", 15)}
    assert estimate.left(remaining) == pytest.approx((20 + 30 + 30) / 2)
    # One that nothing is known of takes the mean of all rounds: 70 s / 25.
    assert estimate.left({"e": ("fedprox", 50)}) == pytest.approx(50 * 70 / 25)


def test_durations_can_be_read():
    shown = [progress.duration(s) for s in (None, 40, 720, 11_100)]
    assert shown == ["unknown", "40 s", "12 min", "3 h 05 min"]


class KillingPool(pool.Pool):
    """Kills the first run once it has done two rounds, as a machine without memory does."""

    def start(self, cell, cores):
        process = super().start(cell, cores)
        affinity.append((cell.name, process, cores))
        if kill and cell.config.algorithm == "fedavg":
            thread = threading.Thread(target=self._kill, args=(cell, process))
            thread.start()
        return process

    def _kill(self, cell, process):
        while cell.rounds_done(self.root) < 2 and process.poll() is None:
            time.sleep(0.01)
        seen.append(os.sched_getaffinity(process.pid))
        process.kill()


affinity, seen, kill = [], [], []
ROUNDS = 10


def test_a_killed_run_and_a_failed_one_stop_nothing_and_go_on(tmp_path, monkeypatch):
    """fedavg is killed, fedlabel cannot read its directory; then the same command goes on."""
    monkeypatch.setattr(command, "Pool", KillingPool)
    cores = sorted(os.sched_getaffinity(0))
    jobs = min(2, len(cores))
    flags = [f"--{name}={value}" for name, value in {**SMALL, "rounds": ROUNDS}.items()]
    flags += [f"--output_dir={tmp_path}", f"--jobs={jobs}", "--algorithms=fedavg,fedlabel"]
    # A directory that holds no run, and is not empty.
    broken = tmp_path / "runs" / "fedlabel-alpha_1-labeled_fraction_0.2-seed_0"
    broken.mkdir(parents=True)
    (broken / "notes.txt").write_text("mine")
    kill.append(True)
    code, out, err = run_script(compare, compare.compare, *flags)
    kill.clear()
    assert code == 1, err
    killed, failed = (name for name, _, _ in affinity)
    assert f"  {killed}: killed by SIGKILL (out of memory?)" in err
    assert f"  {failed}: {broken} is not empty and holds no run" in err
    assert err.splitlines()[-3] == "2 runs failed:" and "table.md" not in out
    # Each on cores of its own.
    assert seen[0] == set(affinity[0][2])
    if jobs == 2:
        assert not set(affinity[0][2]) & set(affinity[1][2])
    before = training.StoredRun(tmp_path / "runs" / killed)
    assert before.summary is None and before.rounds_done >= 2

    code, out, err = run_script(compare, compare.compare, *flags[:-1], "--algorithms=fedavg")
    assert code == 0, err
    after = training.StoredRun(tmp_path / "runs" / killed)
    assert after.summary["rounds"] == ROUNDS
    log = (after.path / "run.log").read_text()
    assert "started at round 0" in log and "resumed at round" in log
    assert "| fedavg |" in out
    assert (broken / "notes.txt").read_text() == "mine"


SLOW_TO_STOP = """\
import pathlib, signal, sys, time
def stop(*_):
    time.sleep(1)
    pathlib.Path(sys.argv[1]).write_text("checkpoint")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """\
import fcntl, os, subprocess, sys
directory, program, out = sys.argv[1:]
lock = os.open(directory + "/.lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.write(lock, str(os.getpid()).encode())
code = f"import child, pathlib; child.RUN_TFF = pathlib.Path({program!r}); child.main()"
command = [sys.executable, "-c", code, str(os.getpid()), sys.argv[-1].split(":")[1], str(lock)]
done = subprocess.Popen([*command, out.split(":")[0]], pass_fds=[lock], start_new_session=True)
done.wait()
"""


def test_runs_of_a_killed_command_stop_and_the_next_one_waits_for_them(tmp_path):
    program, out = tmp_path / "program.py", tmp_path / "out.txt"
    program.write_text(SLOW_TO_STOP)
    core = min(os.sched_getaffinity(0))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), str(program), f"{out}:{core}"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(child.__file__).parent)},
    )
    assert parent.stdout.readline() == "ready\n"
    with pytest.raises(training.RunDirectoryError, match=f"process {parent.pid}"):
        with lock.locked(tmp_path):
            pass
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    with lock.locked(tmp_path):
        # The run had the time to write its checkpoint.
        assert out.read_text() == "checkpoint"
        assert int((tmp_path / ".lock").read_text()) == os.getpid()


def test_a_second_command_is_refused(tmp_path):
    with lock.locked(tmp_path):
        with pytest.raises(training.RunDirectoryError, match="another command"):
            with lock.locked(tmp_path):
                pass
    with lock.locked(tmp_path):
        pass


def test_patience_with_runs_that_do_not_end(tmp_path):
    descriptor = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # by nobody that is alive
    with pytest.raises(training.RunDirectoryError, match="end them first"):
        with lock.locked(tmp_path, patience=0.3):
            pass
    os.close(descriptor)


class _Stoppable:
    """A process that ends some time after SIGTERM."""

    def __init__(self):
        self.returncode, self.terminated = None, 0

    def poll(self):
        if self.terminated:
            self.returncode = 143
        return self.returncode

    def terminate(self):
        self.terminated += 1

    def kill(self):
        raise AssertionError("it was about to end")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_runs_once_and_the_command_says_how_to_go_on(
    number, tmp_path, monkeypatch
):
    monkeypatch.setattr(pool, "_POLL", 0.0)
    processes = []

    class Pool(pool.Pool):
        def start(self, cell, cores):
            processes.append(_Stoppable())
            os.kill(os.getpid(), number)
            return processes[-1]

    monkeypatch.setattr(command, "Pool", Pool)
    previous = signal.getsignal(number)
    code, _, err = run_script(
        *(compare, compare.compare, "--algorithms", "fedavg,fedprox", "--output_dir", tmp_path)
    )
    assert code == 128 + number
    assert [process.terminated for process in processes] == [1]
    assert err.splitlines()[-1] == (
        "compare.py: stopped with 0 of 2 runs finished; the same command continues."
    )
    assert signal.getsignal(number) is previous
