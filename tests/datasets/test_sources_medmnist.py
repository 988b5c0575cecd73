"""MedMNIST's npz form: small files, and a server on this machine that misbehaves on demand."""

import hashlib
import http.server
import io
import threading

import numpy as np
import pytest

from tff_fedlabel.datasets import _medmnist, sources

LABELS = {"organamnist": 11, "bloodmnist": 8}


def _arrays(name, sizes=(40, 10, 20), seed=0):
    rng = np.random.default_rng(seed)
    shape = (28, 28) if name == "organamnist" else (28, 28, 3)
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

    def publish_content(name, content, url="http://127.0.0.1:9/none.npz"):
        entry = {
            "url": url,
            "MD5": hashlib.md5(content).hexdigest(),
            "label": {str(k): f"class{k}" for k in range(LABELS[name])},
        }
        monkeypatch.setattr(_medmnist, "_medmnist_info", lambda: {name: entry})

    return publish_content


class _Server(http.server.ThreadingHTTPServer):
    content = b""
    honours_range = True
    status = None
    break_after = ()  # bytes sent before each of the first answers is cut off
    requests: list


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.requests.append(asked)
        if server.status:
            self.send_error(server.status)
            return
        start = 0
        if asked and server.honours_range:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(server.content):
                self.send_error(416)
                return
            self.send_response(206)
        else:
            self.send_response(200)
        body = server.content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        number = len(server.requests) - 1
        if number < len(server.break_after):
            body = body[: server.break_after[number]]
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = _Server(("127.0.0.1", 0), _Handler)
    server.requests = []
    server.url = f"http://127.0.0.1:{server.server_address[1]}/file.npz?download=1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


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
    ],
)
def test_wrong_contents_are_refused(tmp_path, publish, change):
    arrays = {k: v for k, v in {**_arrays("organamnist"), **change}.items() if v is not None}
    content = _bytes(arrays)
    publish("organamnist", content)
    (tmp_path / "organamnist.npz").write_bytes(content)
    with pytest.raises(sources.CorruptDataError):
        sources.load("organamnist", str(tmp_path))


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
