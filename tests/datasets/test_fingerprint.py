"""Fingerprints of data: what changes them, what does not, and that they are the same elsewhere."""

import dataclasses
import hashlib
import subprocess
import sys
import time

import numpy as np
import pytest

from tff_fedlabel.datasets import _fingerprint, federated, sources
from tff_fedlabel.datasets.sources import Examples

N = 12


def _arguments():
    x = np.arange(N * 16, dtype=np.uint8).reshape(N, 4, 4, 1)
    y = np.arange(N) % 3
    return {
        "x": x,
        "y": y,
        "client_ids": [str(i % 4) for i in range(N)],
        "labeled": np.arange(N) < 6,
        "hidden_y": y,
        "num_classes": 3,
    }


def _fingerprint_of(**changes):
    return federated.from_arrays(**{**_arguments(), **changes}).fingerprint()


def _changed(name, row, value):
    array = np.array(_arguments()[name])
    array[row] = value
    return {name: array}


CHANGES = {
    "one pixel": _changed("x", (7, 2, 1, 0), 255),
    "dtype of the images": {"x": (_arguments()["x"] / 255).astype(np.float32)},
    "shape of the images": {"x": _arguments()["x"].reshape(N, 2, 8, 1)},
    "one label": {name: _changed("y", 4, 2)["y"] for name in ("y", "hidden_y")},
    "a hidden label": _changed("hidden_y", 9, 1),
    "no hidden labels": {"hidden_y": None},
    "an image of another client": _changed("client_ids", 5, "0"),
    "another name of a client": {"client_ids": [str(i % 4 + 1) for i in range(N)]},
    "numbers for names": {"client_ids": [i % 4 for i in range(N)]},
    "a label more": _changed("labeled", 6, True),
    "a class more": {"num_classes": 4},
}


def test_every_change_changes_it():
    found = {case: _fingerprint_of(**change) for case, change in CHANGES.items()}
    found["none"] = _fingerprint_of()
    assert len(set(found.values())) == len(found), found
    assert all(len(value) == 64 and int(value, 16) >= 0 for value in found.values())


@pytest.mark.parametrize(
    "change",
    [
        {"label_names": ["a", "b", "c"]},
        {"x": np.asfortranarray(_arguments()["x"])},
        {"x": np.repeat(_arguments()["x"], 2, axis=0)[::2]},
        {"y": _arguments()["y"].astype(np.uint8)},
        {"y": np.where(np.arange(N) < 6, _arguments()["y"], 2)},  # Not seen where not labelled.
        {"client_ids": np.array(_arguments()["client_ids"], object)},
    ],
)
def test_the_same_data_in_another_form(change):
    assert _fingerprint_of(**change) == _fingerprint_of()


def test_it_is_the_same_in_another_process():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import test_fingerprint; print(test_fingerprint._fingerprint_of())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, __file__.rpartition("/")[0]],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )
    assert result.stdout.strip() == _fingerprint_of(), result.stderr


def test_by_hand(monkeypatch):
    # In little-endian bytes whatever the machine's order is, and whatever the parts are.
    values = np.arange(10, dtype=">i4").reshape(5, 2)
    content = b"text 4\nkind" + b"array <i4 [5 2]\n"
    content += b"".join(bytes([k, 0, 0, 0]) for k in range(10))
    for size in (1, 20, 1 << 24):
        monkeypatch.setattr(_fingerprint, "_CHUNK_BYTES", size)
        result = _fingerprint.Fingerprint("kind")
        result.add_array(values)
        assert result.hex() == hashlib.sha256(content).hexdigest()


def test_of_a_source():
    source = sources.load("digits", seed=1)
    assert source.fingerprint() == sources.load("digits", seed=1).fingerprint()
    test = source.test
    labels = test.y.copy()
    labels[3] += 1
    others = [
        sources.load("digits", seed=2),
        dataclasses.replace(source, test=Examples(test.x, labels)),
        dataclasses.replace(source, validation=test, test=source.validation),
        dataclasses.replace(source, num_classes=11),
    ]
    found = {source.fingerprint(), *(other.fingerprint() for other in others)}
    assert len(found) == 5 and {len(value) for value in found} == {64}


def test_sixty_thousand_images_take_no_time_to_speak_of():
    n = 60_000
    x = np.zeros((n, 28, 28, 1), np.uint8)  # 47 MB
    data = federated.from_arrays(x, np.zeros(n, int), np.arange(n) % 100, np.arange(n) % 5 == 0)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        data.fingerprint()
        times.append(time.perf_counter() - start)
    assert min(times) < 2.0  # .04 s where the processor has instructions for SHA-256
