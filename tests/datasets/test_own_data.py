"""One's own data as source and clients: what it brings stays, what it lacks is made."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest
from own_images import arrays, image, save

from tff_fedlabel.datasets import federated, own_data, partition, sources

CHOICES = {"num_clients": 4, "alpha": 1.0, "labeled_fraction": 0.25}


@pytest.fixture
def saved(tmp_path):
    """Saves arrays as an .npz file."""

    def save_arrays(**columns):
        np.savez(tmp_path / "mine.npz", **columns)
        return tmp_path / "mine.npz"

    return save_arrays


@pytest.fixture
def load(tmp_path):
    def load_it(source, **changed):
        return own_data.load(source, **{**CHOICES, **changed}, data_dir=str(tmp_path / "cache"))

    return load_it


def held(clients, x):
    """(client -> rows of x that it holds labelled, the same unlabelled), found by the pixels."""
    row = {pixels.tobytes(): k for k, pixels in enumerate(x)}
    found = ({}, {})
    for client in clients.client_ids:
        data = clients.client_dataset(
            client, 0, labeled_steps=None, unlabeled_steps=None, batch_size=1000
        )
        for part, rows in zip(("labeled", "unlabeled"), found, strict=True):
            images = [pixels for batch in data[part] for pixels in batch["x"].numpy()]
            rows[client] = sorted(row[pixels.tobytes()] for pixels in images)
    return found


def rows_of(examples, x):
    row = {pixels.tobytes(): k for k, pixels in enumerate(x)}
    return [row[pixels.tobytes()] for pixels in np.asarray(examples.x)]


def everyone(by_client):
    return sorted(row for rows in by_client.values() for row in rows)


def test_images_and_labels_alone_are_divided_as_built_in_data_is(saved, load):
    """The same rows go to the same parts and clients as for the built-in digits."""
    built_in = sources.load("digits", seed=3)
    digits = sources.load("digits", split="pooled", seed=0)  # Another order of the same images.
    x = np.concatenate([part.x for part in (digits.train, digits.validation, digits.test)])
    y = np.concatenate([part.y for part in (digits.train, digits.validation, digits.test)])
    source, clients = load(saved(x=x[..., 0], y=y), seed=3)
    # What `sources.load` does with its published images, of which x is another order.
    order = np.random.default_rng(np.random.SeedSequence((3, 0x5EED))).permutation(len(y))
    sizes = [len(part) for part in (built_in.train, built_in.validation, built_in.test)]
    train, validation, test = np.split(order, np.cumsum(sizes)[:-1])
    for examples, rows in ((source.validation, validation), (source.test, test)):
        np.testing.assert_array_equal(examples.x, x[np.sort(rows)])
        np.testing.assert_array_equal(examples.y, y[np.sort(rows)])
    wanted = federated.from_source(
        sources.Examples(x[train], y[train]),
        partition.partition(y[train], 4, 1.0, seed=3),
        0.25,
        3,
        num_classes=10,
    )
    options = dict(labeled_steps=2, unlabeled_steps=2, batch_size=5, with_hidden_labels=True)
    for client in range(4):
        ours, theirs = (c.client_dataset(client, 1, **options) for c in (clients, wanted))
        for part in ("labeled", "unlabeled"):
            for a, b in zip(ours[part], theirs[part], strict=True):
                np.testing.assert_array_equal(a["x"], b["x"])
                np.testing.assert_array_equal(a["y"], b["y"])
    assert source.note == (
        "mine.npz: 1797 images of 10 classes, 8x8 px; made by seed 3: 4 clients, labels kept of "
        "0.25 of the images, validation part of 89, test part of 269"
    )


def test_own_clients_and_labels_stay(saved, load):
    x, y = arrays(60)
    owner = np.arange(60) % 3
    labeled = np.arange(60) % 4 < 2
    path = saved(x=x, y=np.where(labeled, y, 99), labeled=labeled, client_ids=owner)
    assert own_data.facts(path) == {
        "split": "pooled",
        "num_clients": 3,
        "labeled_fraction": round(25 / 55, 6),  # 30 labelled: 1 for validation, 4 for the test
    }
    source, clients = load(path, seed=1)
    with_label, without = held(clients, x)
    for client in range(3):
        assert without[client] == list(np.flatnonzero(~labeled & (owner == client)))
        assert set(with_label[client]) <= set(np.flatnonzero(labeled & (owner == client)))
    evaluated = rows_of(source.validation, x) + rows_of(source.test, x)
    assert (len(source.validation), len(source.test)) == (1, 4)
    assert sorted(evaluated + everyone(with_label)) == list(np.flatnonzero(labeled))
    np.testing.assert_array_equal(source.test.y, y[rows_of(source.test, x)])
    assert clients.hidden_y is None
    assert "its own: 3 clients, 30 images without label; made" in source.note


def test_unlabelled_images_without_clients_are_dealt_out_evenly(saved, load):
    x, y = arrays(60)
    y = np.where(np.arange(60) < 40, y, -1)
    source, clients = load(saved(x=x, y=y), seed=1)
    with_label, without = held(clients, x)
    assert [len(rows) for rows in without.values()] == [5] * 4
    assert everyone(without) == list(range(40, 60))
    # 40 labelled images: 2 for validation, 6 for the test, 32 for 4 clients.
    assert [len(rows) for rows in with_label.values()] == [8] * 4
    assert (len(source.validation), len(source.test)) == (2, 6)


@pytest.mark.parametrize(
    "y",
    [
        np.array([0.0, 1.0, np.nan, 2.0, np.nan]),
        np.array([0, 1, -1, 2, -1]),
        np.array([[0], [1], [-1], [2], [-1]]),
        np.array(["ant", "bee", "", "cow", ""]),
        np.array([b"ant", b"bee", b"", b"cow", b""]),
    ],
)
def test_ways_to_say_that_there_is_no_label(saved, y):
    listing = own_data.open_source(saved(x=arrays(5)[0], y=y))
    assert listing.y.tolist() == [0, 1, -1, 2, -1] and listing.y.dtype == np.int32
    assert len(listing.label_names) == 3 and listing.num_unlabeled == 2


def test_own_test_and_validation_parts(saved, load):
    x, _ = arrays(50)
    y = np.array(["no", "yes"])[np.arange(50) % 2]
    parts = {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}
    path = saved(**parts)
    source, clients = load(path)
    assert rows_of(source.test, x) == list(range(40, 50))
    # As a built-in data set's "official" split: 5% of the training images.
    drawn = np.random.default_rng(np.random.SeedSequence((0, 0x5EED))).choice(40, 2, replace=False)
    assert rows_of(source.validation, x) == sorted(drawn)
    assert clients.label_names == source.label_names == ("no", "yes")
    assert source.test.y.tolist() == [0, 1] * 5

    parts = {"x": x[:30], "y": y[:30], "x_validation": x[30:40], "y_validation": y[30:40]}
    source, clients = load(saved(**parts))
    assert rows_of(source.validation, x) == list(range(30, 40))
    assert len(source.test) == 4 and max(rows_of(source.test, x)) < 30
    assert "its own: validation part of 10; made by seed 0" in source.note


def test_resized_arrays(saved, load):
    x = np.full((20, 12, 16), 50, np.uint8)
    path = saved(x=x, y=np.arange(20) % 2, x_test=x[:5, :9], y_test=np.arange(5) % 2)
    with pytest.raises(ValueError, match="2 sizes .9x16..12x16 px.; image_size"):
        load(path)
    source, clients = load(path, image_size=8)
    assert source.test.x.shape == (5, 8, 8, 1) and (np.asarray(source.test.x) == 50).all()
    assert "resized from 9x16..12x16 to 8x8 px" in source.note


X, Y = arrays(6)
WRONG = [
    ({"x": X}, ["has x and no y"]),
    ({"y": Y}, ["has y and no x"]),
    ({"images": X, "y": Y}, ["'images'"]),
    ({"x": X, "y": Y, "labelled": Y > 0}, ["'labelled' (did you mean labeled?)"]),
    ({"x": X, "x_train": X, "y": Y}, ["both x and x_train"]),
    ({"x": X / 255.0, "y": Y}, ["x is float64", "uint8"]),
    ({"x": X[..., :2], "y": Y}, ["[6, 10, 10, 2]"]),
    ({"x": np.asfortranarray(X), "y": Y}, ["Fortran"]),
    ({"x": X, "y": Y[:5]}, ["5 entries for 6 images"]),
    ({"x": X, "y": Y + 0.5}, ["image 0 has a label that is not 0, 1, 2"]),
    ({"x": X, "y": np.append(Y[:5], 20231128)}, ["image 5 has a label of 65536 or more"]),
    ({"x": X, "y": Y - 3}, ["has a label that is not 0, 1, 2"]),
    ({"x": X, "y": np.array(list("abcdef"), object)}, ["np.array(names, dtype=str)"]),
    ({"x": X, "y": np.zeros(6, int)}, ["1 class", "at least 2"]),
    ({"x": X, "y": np.full(6, -1)}, ["no training image with a label"]),
    ({"x": X, "y": np.where(Y == 1, -1, Y), "labeled": np.ones(6, bool)}, ["labeled is True"]),
    ({"x": X, "y": Y, "labeled": np.ones(6)}, ["labeled", "booleans"]),
    ({"x": X, "y": Y, "client_ids": np.arange(5)}, ["client_ids", "5 entries for 6"]),
    ({"x": X, "y": Y, "x_test": X, "y_test": Y - 1}, ["y_test", "has no label"]),
    ({"x": X, "y": Y, "x_test": X[..., 0], "y_test": Y}, ["as many channels"]),
    ({"x": X, "y": Y, "x_test": X, "y_test": Y.astype(str)}, ["names and some numbers"]),
    ({"x": X[:, :7, :7], "y": Y}, ["7x7 px", "image_size"]),
]


@pytest.mark.parametrize("columns,words", WRONG, ids=lambda value: "")
def test_arrays_that_do_not_fit(saved, load, columns, words):
    with pytest.raises(ValueError) as error:
        load(saved(**columns))
    assert len(str(error.value).splitlines()) == 1
    for word in words:
        assert word in str(error.value)


def test_damaged_file(tmp_path, saved, load):
    path = saved(x=X, y=Y)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        offset = file.getinfo("x.npy").header_offset
    for content in (b"text", whole[:-30], whole[: offset + 900] + b"?" + whole[offset + 901 :]):
        path.write_bytes(content)
        with pytest.raises(sources.CorruptDataError, match="mine.npz cannot be read"):
            load(path)
    with pytest.raises(sources.DataNotFoundError, match="no folder or .npz file"):
        load(tmp_path / "other.npz")


def test_a_function_gives_arrays_or_a_source(load):
    calls = []

    def mine():
        calls.append(1)
        return {"x": X, "y": Y, "client_ids": list("aabbcc")}

    _, clients = load(mine, labeled_fraction=1.0)
    assert own_data.facts(mine)["num_clients"] == 3 and len(calls) == 1
    assert clients.client_ids == ["a", "b", "c"]
    assert np.shares_memory(clients._x, X)

    digits = sources.load("digits")
    source, clients = load(lambda: digits)
    assert source is digits and clients.num_classes == 10 and len(clients.client_ids) == 4
    with pytest.raises(ValueError, match="must return a mapping .* got int"):
        load(lambda: 3)


def test_clients_and_fingerprint_do_not_copy_the_images(saved, load):
    x, y = arrays(40)
    path = saved(x=x, y=y)
    source, clients = load(path)
    mapped = clients._x
    while not isinstance(mapped, np.memmap):
        assert not mapped.flags.owndata and not mapped.flags.writeable
        mapped = mapped.base
    prints = {clients.fingerprint() + source.fingerprint()}
    prints.add(clients.fingerprint() + load(path, seed=1)[0].fingerprint())  # Another split.
    x[7, 3, 3, 0] += 1
    source, clients = load(saved(x=x, y=y))
    prints.add(clients.fingerprint() + source.fingerprint())
    assert len(prints) == 3


READ = """
import sys, time
from tff_fedlabel.datasets import _image_cache, own_data
write = _image_cache.ImageCache.write
def slowly(*args):
    time.sleep(1)
    print("written", flush=True)
    return write(*args)
_image_cache.ImageCache.write = slowly
images, _ = own_data.open_source(sys.argv[1]).images.read(None, sys.argv[2])
print(images.shape)
"""


def test_two_processes_read_once(tmp_path):
    """The second waits for the first, and then finds what that wrote."""
    for number in range(20):
        save(tmp_path / "data" / "ab"[number % 2] / f"{number}.png", image(number))
    command = [sys.executable, "-c", READ, str(tmp_path / "data"), str(tmp_path / "cache")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [line for process in both for line in process.communicate(timeout=100)[0].splitlines()]
    assert sorted(lines) == ["(20, 10, 10, 3)", "(20, 10, 10, 3)", "written"]
    (kept,) = (tmp_path / "cache").iterdir()
    assert np.load(kept).shape == (20, 10, 10, 3)
