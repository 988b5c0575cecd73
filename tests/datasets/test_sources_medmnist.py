"""MedMNIST's npz form: small files, and a server on this machine that misbehaves on demand."""

import errno
import fcntl
import hashlib
import io
import tracemalloc

import numpy as np
import pytest

from tff_fedlabel.datasets import _medmnist, sources

LABELS = {"organamnist": 11, "bloodmnist": 8}


def _arrays(name, sizes=(40, 10, 20), seed=0, pixels=28):
    rng = np.random.default_rng(seed)
    shape = (pixels, pixels) if name == "organamnist" else (pixels, pixels, 3)
    arrays = {}
    for key, n in zip(("train", "val", "test"), sizes, strict=True):
        arrays[f"{key}_images"] = rng.integers(0, 256, (n, *shape), np.uint8)
        arrays[f"{key}_labels"] = rng.integers(0, LABELS[name], (n, 1)).astype(np.uint8)
    return arrays


def _bytes(arrays):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


@pytest.fixture
def publish(monkeypatch):
    """Makes `content` the published file of `name`."""

    def publish_content(name, content, url="http://127.0.0.1:9/none.npz", suffix=""):
        entry = {
            f"url{suffix}": url,
            f"MD5{suffix}": hashlib.md5(content).hexdigest(),
            "label": {str(k): f"class{k}" for k in range(LABELS[name])},
        }
        monkeypatch.setattr(_medmnist, "_medmnist_info", lambda: {name: entry})

    return publish_content


@pytest.mark.parametrize("name", ["organamnist", "bloodmnist"])
def test_reads_the_published_form(tmp_path, publish, no_network, name):
    arrays = _arrays(name)
    content = _bytes(arrays)
    publish(name, content)
    (tmp_path / f"{name}.npz").write_bytes(content)
    source = sources.load(name, str(tmp_path), split="official")
    for part, key in ((source.train, "train"), (source.validation, "val"), (source.test, "test")):
        images = arrays[f"{key}_images"]
        np.testing.assert_array_equal(part.x, images if images.ndim == 4 else images[..., None])
        np.testing.assert_array_equal(part.y, arrays[f"{key}_labels"][:, 0])
        assert part.x.dtype == np.uint8 and part.y.dtype == np.int32
    assert source.num_classes == LABELS[name] and source.label_names[2] == "class2"
    pooled = sources.load(name, str(tmp_path))
    assert [len(part) for part in (pooled.train, pooled.validation, pooled.test)] == [57, 3, 10]


@pytest.mark.parametrize("size", [64, 128, 224])
@pytest.mark.parametrize("name", ["organamnist", "bloodmnist"])
def test_larger_images(tmp_path, publish, no_network, name, size):
    arrays = _arrays(name, sizes=(5, 2, 3), pixels=size)
    content = _bytes(arrays)
    publish(name, content, suffix=f"_{size}")
    (tmp_path / f"{name}_{size}.npz").write_bytes(content)
    source = sources.load(name, str(tmp_path), split="official", image_size=size)
    images = arrays["test_images"]
    np.testing.assert_array_equal(source.test.x, images if images.ndim == 4 else images[..., None])
    assert source.train.x.shape == (5, size, size, 1 if name == "organamnist" else 3)


def test_larger_images_have_a_file_of_their_own(tmp_path, publish, server):
    content = server.content = _bytes(_arrays("bloodmnist", pixels=64))
    publish("bloodmnist", content, server.url, suffix="_64")
    (tmp_path / "bloodmnist.npz").write_bytes(b"another file")
    assert sources.load("bloodmnist", str(tmp_path), image_size=64).train.x.shape[1:] == (64, 64, 3)
    assert (tmp_path / "bloodmnist_64.npz").read_bytes() == content
    with pytest.raises(sources.DataNotFoundError, match="put bloodmnist_64.npz from"):
        sources.load("bloodmnist", str(tmp_path / "none"), download=False, image_size=64)


def test_a_file_of_another_size_is_refused(tmp_path, publish):
    content = _bytes(_arrays("bloodmnist", pixels=28))
    publish("bloodmnist", content, suffix="_64")
    (tmp_path / "bloodmnist_64.npz").write_bytes(content)
    with pytest.raises(sources.CorruptDataError, match="images are 28 x 28"):
        sources.load("bloodmnist", str(tmp_path), image_size=64)


def test_images_are_unpacked_in_parts(tmp_path, publish):
    arrays = _arrays("bloodmnist", sizes=(1200, 10, 20), pixels=64)
    content = _bytes(arrays)
    publish("bloodmnist", content, suffix="_64")
    (tmp_path / "bloodmnist_64.npz").write_bytes(content)
    tracemalloc.start()
    try:
        source = sources.load("bloodmnist", str(tmp_path), split="official", image_size=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(source.train.x, arrays["train_images"])
    whole = sum(len(part) for part in (source.train, source.validation, source.test)) * 64 * 64 * 3
    assert whole < peak < 1.7 * whole  # Twice and more when a split is unpacked at once.


def test_default_folder(tmp_path, publish, no_network, monkeypatch):
    content = _bytes(_arrays("organamnist"))
    publish("organamnist", content)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".medmnist").mkdir()
    (tmp_path / ".medmnist" / "organamnist.npz").write_bytes(content)
    assert len(sources.load("organamnist", download=False).train) == 57


@pytest.mark.parametrize("damage", [lambda c: c[:-50], lambda c: c[:400] + b"\0" + c[401:]])
def test_damage_is_found_by_checksum(tmp_path, publish, no_network, damage):
    content = _bytes(_arrays("organamnist"))
    publish("organamnist", content)
    (tmp_path / "organamnist.npz").write_bytes(damage(content))
    with pytest.raises(sources.CorruptDataError, match="has MD5") as error:
        sources.load("organamnist", str(tmp_path))
    assert str(tmp_path / "organamnist.npz") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"train_images": np.zeros((40, 28, 28), np.float32)},
        {"train_labels": np.zeros((39, 1), np.uint8)},
        {"train_labels": np.full((40, 1), 11, np.uint8)},
        {"test_images": np.zeros((20, 32, 32), np.uint8)},
        {"val_images": None},
        {"val_images": np.asfortranarray(np.ones((10, 28, 28), np.uint8))},
        {"val_images": np.zeros((10, 28, 28, 2), np.uint8)},
        {"test_images": np.zeros((20, 28, 28, 3), np.uint8)},
        {"test_labels": None},
    ],
)
def test_wrong_contents_are_refused(tmp_path, publish, change):
    arrays = {k: v for k, v in {**_arrays("organamnist"), **change}.items() if v is not None}
    content = _bytes(arrays)
    publish("organamnist", content)
    (tmp_path / "organamnist.npz").write_bytes(content)
    with pytest.raises(sources.CorruptDataError) as error:
        sources.load("organamnist", str(tmp_path))
    assert str(error.value).startswith("organamnist: ") and "\n" not in str(error.value)


def test_missing_without_download(tmp_path, publish, no_network):
    publish("bloodmnist", b"")
    with pytest.raises(sources.DataNotFoundError) as error:
        sources.load("bloodmnist", str(tmp_path), download=False)
    assert str(tmp_path / "bloodmnist.npz") in str(error.value)
    assert "http://127.0.0.1:9/none.npz" in str(error.value) and "\n" not in str(error.value)


def test_download(tmp_path, publish, server):
    content = server.content = _bytes(_arrays("bloodmnist"))
    publish("bloodmnist", content, server.url)
    folder = tmp_path / "new" / "folder"
    assert len(sources.load("bloodmnist", str(folder)).train) == 57
    assert [path.name for path in folder.iterdir()] == ["bloodmnist.npz"]
    assert (folder / "bloodmnist.npz").read_bytes() == content
    sources.load("bloodmnist", str(folder))
    assert server.requests == [None]


def test_broken_connection_is_continued(tmp_path, publish, server):
    content = server.content = _bytes(_arrays("bloodmnist"))
    server.break_after = (10_000, 20_000)
    publish("bloodmnist", content, server.url)
    sources.load("bloodmnist", str(tmp_path))
    assert server.requests == [None, "bytes=10000-", "bytes=30000-"]
    assert (tmp_path / "bloodmnist.npz").read_bytes() == content


def test_server_that_gives_nothing_leaves_the_part_for_next_time(tmp_path, publish, server):
    content = server.content = _bytes(_arrays("bloodmnist"))
    server.break_after = (10_000, 0)
    publish("bloodmnist", content, server.url)
    with pytest.raises(sources.DataNotFoundError, match="is kept and continued next time"):
        sources.load("bloodmnist", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["bloodmnist.npz.part"]
    server.break_after = ()
    sources.load("bloodmnist", str(tmp_path))
    assert server.requests[-1] == "bytes=10000-"
    assert [path.name for path in tmp_path.iterdir()] == ["bloodmnist.npz"]


def test_part_of_another_file_is_thrown_away(tmp_path, publish, server):
    content = server.content = _bytes(_arrays("bloodmnist"))
    publish("bloodmnist", content, server.url)
    for stale in (b"x" * 500, b"x" * (len(content) + 5)):
        (tmp_path / "bloodmnist.npz").unlink(missing_ok=True)
        (tmp_path / "bloodmnist.npz.part").write_bytes(stale)
        sources.load("bloodmnist", str(tmp_path))
        assert (tmp_path / "bloodmnist.npz").read_bytes() == content


def test_whole_part_needs_no_more_bytes(tmp_path, publish, server):
    content = server.content = _bytes(_arrays("bloodmnist"))
    publish("bloodmnist", content, server.url)
    (tmp_path / "bloodmnist.npz.part").write_bytes(content)
    sources.load("bloodmnist", str(tmp_path))
    assert server.requests == [f"bytes={len(content)}-"]


def test_server_without_ranges(tmp_path, publish, server):
    content = server.content = _bytes(_arrays("bloodmnist"))
    server.honours_range = False
    server.break_after = (10_000,)
    publish("bloodmnist", content, server.url)
    sources.load("bloodmnist", str(tmp_path))
    assert (tmp_path / "bloodmnist.npz").read_bytes() == content


def test_wrong_file_on_the_server(tmp_path, publish, server):
    server.content = b"<html>moved</html>"
    publish("bloodmnist", _bytes(_arrays("bloodmnist")), server.url)
    with pytest.raises(sources.CorruptDataError, match="has MD5"):
        sources.load("bloodmnist", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_not_found_on_the_server(tmp_path, publish, server):
    server.status = 404
    publish("bloodmnist", b"", server.url)
    with pytest.raises(sources.DataNotFoundError, match="404") as error:
        sources.load("bloodmnist", str(tmp_path))
    assert str(tmp_path / "bloodmnist.npz") in str(error.value) and "\n" not in str(error.value)
    assert server.requests == [None]


def test_unreachable_server(tmp_path, publish, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    publish("bloodmnist", b"")
    with pytest.raises(sources.DataNotFoundError, match="could not be downloaded"):
        sources.load("bloodmnist", str(tmp_path))


def test_folder_that_cannot_be_made(tmp_path, publish):
    publish("bloodmnist", b"")
    (tmp_path / "file").write_text("")
    with pytest.raises(sources.DataNotFoundError, match="could not be downloaded"):
        sources.load("bloodmnist", str(tmp_path / "file" / "folder"))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_file_systems_without_locks(tmp_path, publish, server, monkeypatch, number):
    def refuse(file, operation):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    content = server.content = _bytes(_arrays("bloodmnist"))
    publish("bloodmnist", content, server.url)
    (tmp_path / "bloodmnist.npz.part").write_bytes(b"of another process")
    assert len(sources.load("bloodmnist", str(tmp_path)).train) == 57
    assert (tmp_path / "bloodmnist.npz").read_bytes() == content
    assert (tmp_path / "bloodmnist.npz.part").read_bytes() == b"of another process"


def test_data_in_a_folder_that_cannot_be_written_to(tmp_path, publish, no_network, monkeypatch):
    content = _bytes(_arrays("bloodmnist"))
    publish("bloodmnist", content)
    (tmp_path / "bloodmnist.npz").write_bytes(content)
    # The superuser may write anywhere, so that the folder's mode alone would prove nothing.
    tmp_path.chmod(0o555)
    monkeypatch.setattr(_medmnist, "_download", lambda *_: pytest.fail("wants to write"))
    assert len(sources.load("bloodmnist", str(tmp_path)).train) == 57
