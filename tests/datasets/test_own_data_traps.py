"""One's own data in forms that a careless or hostile user has: names, links, pipes, old caches."""

import io
import os
import zipfile

import numpy as np
import pytest
from own_images import arrays, image, save

from tff_fedlabel.datasets import federated, own_data, sources


def fill(folder, *paths):
    for number, path in enumerate(paths):
        save(folder / path / f"{number}.png", image(number))
    return folder


def read(folder, tmp_path):
    return own_data.open_source(folder).images.read(None, str(tmp_path / "cache"))[0]


def kept(tmp_path):
    return sorted(os.listdir(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["a" * 250, "é" * 120, "[1]", "*", "a\nb", "q\"'<i>", "{0} %s"])
def test_any_name_of_a_folder_and_one_array_for_it(tmp_path, name):
    data = fill(tmp_path / name, "cat", "dog")
    read(data, tmp_path)
    save(data / "dog" / "2.png", image(2))
    assert len(read(data, tmp_path)) == 3
    assert len(kept(tmp_path)) == 1


def test_a_pipe_is_not_waited_for(tmp_path):
    data = fill(tmp_path / "data", "cat", "dog")
    os.mkfifo(data / "cat" / "pipe.png")
    with pytest.raises(sources.UnusableFilesError, match="cat/pipe.png: it is no regular file"):
        read(data, tmp_path)


def test_links_that_lead_nowhere_are_named(tmp_path):
    data = fill(tmp_path / "data", "cat", "dog")
    for name in ("itself.png", "nowhere.png"):
        (data / "cat" / name).symlink_to(data / "cat" / "itself.png")
    (data / "loop").symlink_to(data / "loop")
    with pytest.raises(sources.UnusableFilesError) as caught:
        read(data, tmp_path)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  cat/itself.png",
        "  cat/nowhere.png",
    ]


def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    data = fill(tmp_path / "data", "cat", "dog")
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(sources.DataNotFoundError, match=r"/dog cannot be read \(Permission denied"):
        own_data.open_source(data)


@pytest.mark.parametrize(
    "paths,words",
    [
        (("cat", "dog", "Unlabeled"), ["'Unlabeled'", "'unlabeled'"]),
        (("ann/cat", "ann/dog", "bob/UNLABELED"), ["'UNLABELED'", "'unlabeled'"]),
        (("Train/cat", "Train/dog", "Test/cat"), ["'Test'", "'test'"]),
        (("train/cat", "train/dog", "Test/cat"), ["'Test'", "'test'"]),
        (
            ("Training/cat", "Training/dog", "Testing/cat"),
            ["Testing", "be a client", "'test'"],
        ),
        (("ann/cat", "ann/dog", "val/cat"), ["val", "be a client", "'validation'"]),
    ],
)
def test_parts_by_other_names_are_not_taken_for_classes_or_clients(tmp_path, paths, words):
    fill(tmp_path, *paths)
    with pytest.raises(ValueError) as error:
        own_data.open_source(tmp_path)
    assert len(str(error.value).splitlines()) == 1
    for word in words:
        assert word in str(error.value)


def test_classes_called_valid_and_invalid(tmp_path):
    fill(tmp_path, "valid", "invalid")
    assert own_data.open_source(tmp_path).label_names == ("invalid", "valid")


@pytest.mark.parametrize("paths", [(b"cat", b"d\xff"), (b"ann/cat", b"ann/dog", b"b\xff/cat")])
def test_names_that_are_not_utf_8(tmp_path, paths):
    for number, path in enumerate(paths):
        save(tmp_path / os.fsdecode(path) / f"{number}.png", image(number))
    with pytest.raises(ValueError, match=r"\\xff', whose name is not UTF-8; rename it") as error:
        own_data.open_source(tmp_path)
    str(error.value).encode()


def test_what_a_killed_process_left_goes_with_the_next_reading(tmp_path):
    data = fill(tmp_path / "data", "cat", "dog")
    read(data, tmp_path)
    (name,) = kept(tmp_path)
    of_earlier_files = f".{name.rpartition('-')[0]}-{'0' * 24}.partial-123.npy"
    (tmp_path / "cache" / of_earlier_files).write_bytes(b"partial")
    save(data / "dog" / "2.png", image(2))
    assert len(read(data, tmp_path)) == 3
    assert not (tmp_path / "cache" / of_earlier_files).exists() and len(kept(tmp_path)) == 1


@pytest.mark.parametrize("content", ["nothing", "numbers", "a table"])
def test_something_else_where_images_were_kept(tmp_path, content):
    data = fill(tmp_path / "data", "cat", "dog")
    wanted = read(data, tmp_path).copy()
    path = tmp_path / "cache" / kept(tmp_path)[0]
    path.write_bytes(b"")
    if content != "nothing":
        other = np.zeros(wanted.shape) if content == "numbers" else np.zeros((2, 3), np.uint8)
        np.save(path, other)
    np.testing.assert_array_equal(read(data, tmp_path), wanted)


def headed(descr, shape, content=b""):
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


def test_damaged_arrays_name_the_file(tmp_path):
    labels = io.BytesIO()
    np.save(labels, np.arange(6) % 2)
    for x in (b"hello", b"\x93NUMPY\x09\x00" + bytes(99), headed("|u1", (6, 9, 9, 3), b"short")):
        with zipfile.ZipFile(tmp_path / "mine.npz", "w") as file:
            file.writestr("x.npy", x)
            file.writestr("y.npy", labels.getvalue())
        with pytest.raises(sources.CorruptDataError, match="mine.npz cannot be read"):
            own_data.open_source(tmp_path / "mine.npz").images.read(None, str(tmp_path))


def test_an_encrypted_file_is_named(tmp_path):
    path = tmp_path / "mine.npz"
    x, y = arrays(6)
    np.savez(path, x=x, y=y)
    content = bytearray(path.read_bytes())
    entry = content.find(b"PK\x01\x02")
    while entry >= 0:
        content[entry + 8] |= 1  # The flag of encryption.
        entry = content.find(b"PK\x01\x02", entry + 4)
    path.write_bytes(bytes(content))
    with pytest.raises(sources.CorruptDataError, match="mine.npz cannot be read .*encrypted"):
        own_data.open_source(path)


class Opened:
    """Pickled, it makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("field", ["x", "y", "client_ids", "labeled"])
def test_pickled_objects_are_not_loaded(tmp_path, field):
    x, y = arrays(6)
    columns = {"x": x, "y": y}
    columns[field] = np.array([Opened(str(tmp_path / "opened"))] * 6)
    np.savez(tmp_path / "mine.npz", **columns)
    with pytest.raises(ValueError, match=field):
        own_data.open_source(tmp_path / "mine.npz").images.read(None, str(tmp_path))
    assert not (tmp_path / "opened").exists()


def test_labels_that_number_no_classes():
    """Each smaller number would get a name."""
    x, y = arrays(6)
    owners, flags = list("aabbcc"), np.ones(6, bool)
    with pytest.raises(federated.ClientDataError, match="label 20231128 .* is not 0..65535"):
        federated.from_arrays(x, np.append(y[:5], 20231128), owners, flags)
    with pytest.raises(ValueError, match="^num_classes "):
        federated.from_arrays(x, y, owners, flags, num_classes=2**31 - 1)
