"""Processes that want the same data at the same time."""

import hashlib
import io
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tff_fedlabel.datasets import _download_lock

LOAD = """
import json, sys
from tff_fedlabel.datasets import _medmnist, sources
info = json.loads(sys.argv[2])
_medmnist._medmnist_info = lambda: {"bloodmnist": info}
print(sources.load("bloodmnist", sys.argv[1]).fingerprint())
"""

# In place of tensorflow-datasets' own work: a line for each that prepares, and a folder at the end.
PREPARE = """
import pathlib, sys, time
from tff_fedlabel.datasets import _tfds
root = pathlib.Path(sys.argv[1])

class Builder:
    def download_and_prepare(self):
        print("preparing", flush=True)
        while not (root / "go on").exists():
            time.sleep(0.05)
        (root / "cifar10" / "3.0.2").mkdir(parents=True)

class Tfds:
    @staticmethod
    def builder(name, data_dir, try_gcs):
        return Builder()

_tfds._probe = lambda url: None
_tfds._import_tfds = lambda: Tfds
_tfds._open_folder = lambda name, dataset, folder: folder
print(_tfds.open_prepared("cifar10", sys.argv[1], True), flush=True)
"""


class Process:
    """A Python process; `stop` is safe to call again."""

    def __init__(self, code, *arguments):
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, text, stream):
        """Reads lines until one has `text`."""
        for line in getattr(self._process, stream):
            if text in line:
                return
        raise AssertionError(f"ended without {text!r}")

    def result(self):
        """The rest of stdout, after a good end."""
        out, err = self._process.communicate(timeout=120)
        assert self._process.returncode == 0, err
        return out.strip()

    def kill(self):
        self._process.kill()
        self._process.communicate()

    def stop(self):
        if self._process.poll() is None:
            self.kill()


@pytest.fixture
def start():
    """Starts processes and ends those that are left."""
    processes = []

    def start_one(*arguments):
        processes.append(Process(*arguments))
        return processes[-1]

    yield start_one
    for process in processes:
        process.stop()


def _until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def published(server):
    """What a process must know of a file that the server sends half of, then holds."""
    rng = np.random.default_rng(0)
    arrays = {}
    for key, number in (("train", 400), ("val", 10), ("test", 20)):
        arrays[f"{key}_images"] = rng.integers(0, 256, (number, 28, 28, 3), np.uint8)
        arrays[f"{key}_labels"] = rng.integers(0, 8, (number, 1)).astype(np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    server.content = buffer.getvalue()
    server.hold_after = len(server.content) // 2
    md5 = hashlib.md5(server.content).hexdigest()
    labels = {str(k): str(k) for k in range(8)}
    return json.dumps({"url": server.url, "MD5": md5, "label": labels})


def test_the_second_uses_the_file_of_the_first(tmp_path, server, published, start):
    first = start(LOAD, tmp_path, published)
    _until(lambda: server.requests)
    second = start(LOAD, tmp_path, published)
    second.wait_for("waiting for another process", "stderr")
    server.go_on.set()
    assert first.result() == second.result() != ""
    assert server.requests == [None]
    assert [path.name for path in tmp_path.iterdir()] == ["bloodmnist.npz"]
    assert (tmp_path / "bloodmnist.npz").read_bytes() == server.content


def test_the_second_goes_on_where_the_first_died(tmp_path, server, published, start):
    first = start(LOAD, tmp_path, published)
    part = tmp_path / "bloodmnist.npz.part"
    _until(lambda: part.exists() and part.stat().st_size > 0)
    second = start(LOAD, tmp_path, published)
    second.wait_for("waiting for another process", "stderr")
    first.kill()
    assert len(second.result()) == 64
    assert server.requests[0] is None and server.requests[1].startswith("bytes=")
    assert len(server.requests) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bloodmnist.npz"]
    assert (tmp_path / "bloodmnist.npz").read_bytes() == server.content


def test_one_of_two_prepares(tmp_path, start):
    first = start(PREPARE, tmp_path)
    first.wait_for("preparing", "stdout")
    second = start(PREPARE, tmp_path)
    second.wait_for("waiting for another process", "stderr")
    (tmp_path / "go on").touch()
    folder = str(tmp_path / "cifar10" / "3.0.2")
    assert first.result() == folder
    assert second.result() == folder  # and no line "preparing" before it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cifar10", "go on"]


def test_many_threads_take_turns(tmp_path):
    # Each removes the lock file under the others: the file that they wait for may be gone.
    inside, most, turns = [], [], []

    def work():
        for _ in range(20):
            with _download_lock.one_at_a_time(tmp_path / "lock", "it") as alone:
                inside.append(1)
                most.append(len(inside))
                turns.append(alone)
                time.sleep(0.0005)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(turns) == 160 and all(turns) and max(most) == 1
    assert list(tmp_path.iterdir()) == []


def test_lock_ends_with_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError), _download_lock.one_at_a_time(tmp_path / "lock", "it"):
            raise KeyError
    with pytest.raises(FileNotFoundError), _download_lock.one_at_a_time(tmp_path / "no" / "x", ""):
        pass
