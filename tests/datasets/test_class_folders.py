"""Folders of image files: which images, labels, clients and parts they are."""

import os
import pathlib

import numpy as np
import PIL.Image
import pytest
from own_images import image, save

from tff_fedlabel.datasets import own_data, sources


def listed(folder):
    """Every image of a listing: {seed of the file's name: (part, client, class name or None)}."""
    listing = own_data.open_source(folder)
    parts = [part for part, size in listing.sizes.items() for _ in range(size)]
    names = [listing.label_names[y] if y >= 0 else None for y in listing.y]
    owners = listing.client_ids or [None] * listing.sizes["train"]
    owners = [*owners, *[None] * (len(names) - len(owners))]
    files = [int(pathlib.Path(file).stem) for file in listing.images._files]
    return dict(zip(files, zip(parts, owners, names, strict=True), strict=True))


def fill(folder, *paths):
    for number, path in enumerate(paths):
        save(folder / path / f"{number}.png", image(number))


def test_class_folders(tmp_path):
    fill(tmp_path, "dog", "cat", "cat", "unlabeled")
    (tmp_path / "README.txt").write_text("about")
    (tmp_path / "cat" / ".hidden").write_text("")
    (tmp_path / "cat" / "Thumbs.db").write_text("")
    (tmp_path / "empty").mkdir()
    assert listed(tmp_path) == {
        0: ("train", None, "dog"),
        1: ("train", None, "cat"),
        2: ("train", None, "cat"),
        3: ("train", None, None),
    }
    assert own_data.open_source(tmp_path).label_names == ("cat", "dog")


def test_numbers_as_classes_are_in_their_order(tmp_path):
    fill(tmp_path, *map(str, range(12)))
    listing = own_data.open_source(tmp_path)
    assert listing.label_names == tuple(map(str, range(12)))
    assert listed(tmp_path)[10] == ("train", None, "10")


def test_client_folders(tmp_path):
    fill(tmp_path, "ann/cat", "ann/dog", "bob/dog", "bob/unlabelled", "cy/unlabeled", "test/cat")
    assert listed(tmp_path) == {
        0: ("train", "ann", "cat"),
        1: ("train", "ann", "dog"),
        2: ("train", "bob", "dog"),
        3: ("train", "bob", None),
        4: ("train", "cy", None),
        5: ("test", None, "cat"),
    }
    assert own_data.facts(tmp_path) == {
        "split": "official",
        "num_clients": 3,
        "labeled_fraction": 0.6,  # 3 of 5; 5% of 3 for validation is none
    }


@pytest.mark.parametrize("clients", [False, True])
def test_parts(tmp_path, clients):
    train = ["train/ann/cat", "train/bob/dog"] if clients else ["train/cat", "train/dog"]
    unlabeled = "train/bob/unlabeled" if clients else "unlabeled"
    fill(tmp_path, *train, unlabeled, "validation/dog", "test/cat", "test/dog")
    ann, bob = ("ann", "bob") if clients else (None, None)
    assert listed(tmp_path) == {
        0: ("train", ann, "cat"),
        1: ("train", bob, "dog"),
        2: ("train", bob, None),
        3: ("validation", None, "dog"),
        4: ("test", None, "cat"),
        5: ("test", None, "dog"),
    }


@pytest.mark.parametrize(
    "paths,words",
    [
        (["cat"], ["1 class (cat)", "at least 2"]),
        (["unlabeled"], ["no training image with a label"]),
        ([], ["has no images in class folders"]),
        (["test/cat", "test/dog"], ["has no images in class folders"]),
        (["cat", "ann/dog"], ["mixes class folders", "'cat'", "'ann'"]),
        (["ann/cat/small", "ann/dog"], ["small is too deep"]),
        (["train/cat", "train/dog", "val/cat"], ["'val' beside 'train'"]),
        (["ann/cat", "ann/dog", "unlabeled"], ["unlabeled does not say which client"]),
        (["train/ann/cat", "train/ann/dog", "unlabeled"], ["does not say which client"]),
        (["cat", "dog", "test/cat", "test/unlabeled"], ["only be training images"]),
    ],
)
def test_folders_of_no_known_form(tmp_path, paths, words):
    fill(tmp_path, *paths)
    with pytest.raises(ValueError) as error:
        own_data.open_source(tmp_path)
    assert len(str(error.value).splitlines()) == 1
    for word in words:
        assert word in str(error.value)


def test_files_that_are_no_images_are_named(tmp_path):
    fill(tmp_path, "cat", "dog")
    (tmp_path / "cat" / "a.gif").write_bytes(b"GIF89a")
    (tmp_path / "unlabeled").mkdir()
    (tmp_path / "unlabeled" / "notes.txt").write_text("to do")
    save(tmp_path / "outside.png", image(1))
    with pytest.raises(sources.UnusableFilesError) as error:
        own_data.open_source(tmp_path)
    assert str(error.value).splitlines() == [
        f"3 files in {tmp_path} cannot be used; mend or remove them:",
        "  outside.png: it lies outside the class folders",
        "  cat/a.gif: its name does not end in .png, .jpg or .jpeg",
        "  unlabeled/notes.txt: its name does not end in .png, .jpg or .jpeg",
    ]


def read(folder, tmp_path, image_size=None):
    return own_data.open_source(folder).images.read(image_size, str(tmp_path / "cache"))


def test_pixels_are_those_of_the_files(tmp_path):
    data = tmp_path / "data"
    fill(data, "cat", "dog", "dog")
    images, sizes = read(data, tmp_path)
    assert images.dtype == np.uint8 and not images.flags.writeable and str(sizes) == "10x10"
    np.testing.assert_array_equal(images, [image(k) for k in range(3)])


def test_grey_images_have_one_channel_unless_others_are_coloured(tmp_path):
    data = tmp_path / "data"
    grey = image(0, channels=1)
    save(data / "cat" / "0.png", grey)
    save(data / "dog" / "1.png", grey.astype(np.uint16) * 256 + 7)  # 16 bits
    images, _ = read(data, tmp_path)
    np.testing.assert_array_equal(images, np.stack([grey, grey])[..., None])
    save(data / "dog" / "2.png", image(2))
    images, _ = read(data, tmp_path)
    np.testing.assert_array_equal(images[1], np.repeat(grey[..., None], 3, -1))
    np.testing.assert_array_equal(images[2], image(2))


def test_palettes_and_transparency(tmp_path):
    data, pixels = tmp_path / "data", image(0)
    save(data / "cat" / "0.png", np.dstack([pixels, np.full((10, 10), 9, np.uint8)]))
    few = np.array([[0, 50, 100], [200, 10, 30]], np.uint8)[pixels[..., 0] % 2]
    (data / "dog").mkdir()
    PIL.Image.fromarray(few).quantize(2).save(data / "dog" / "1.png")
    images, _ = read(data, tmp_path)
    np.testing.assert_array_equal(images, [pixels, few])


def test_photos_are_turned_as_they_say(tmp_path):
    data, pixels = tmp_path / "data", image(0, 10, 8)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # To be turned by 90 degrees clockwise.
    (data / "cat").mkdir(parents=True)
    PIL.Image.fromarray(pixels).save(data / "cat" / "0.png", exif=exif)
    save(data / "dog" / "1.png", image(1, 8, 10))
    images, sizes = read(data, tmp_path)
    assert str(sizes) == "8x10"
    np.testing.assert_array_equal(images, [np.rot90(pixels, -1), image(1, 8, 10)])
    save(data / "dog" / "2.png", image(1, 10, 8))
    with pytest.raises(ValueError, match="2 sizes .8x10..10x8 px"):
        read(data, tmp_path)


def test_images_are_resized(tmp_path):
    """Constant images stay constant; the left half of a large one stays left."""
    data = tmp_path / "data"
    save(data / "cat" / "0.png", np.full((20, 30, 3), 77, np.uint8))
    halves = np.zeros((64, 64, 3), np.uint8)
    halves[:, :32] = 200
    save(data / "dog" / "1.png", halves)
    images, sizes = read(data, tmp_path, image_size=8)
    assert images.shape == (2, 8, 8, 3) and str(sizes) == "20x30..64x64"
    np.testing.assert_array_equal(images[0], np.full((8, 8, 3), 77))
    np.testing.assert_array_equal(images[1, :, :3], np.full((8, 3, 3), 200))
    np.testing.assert_array_equal(images[1, :, 5:], np.zeros((8, 3, 3)))
    for size in (7, 257):
        with pytest.raises(ValueError, match="^image_size "):
            read(data, tmp_path, image_size=size)


def test_images_that_fit_no_model_ask_for_a_size(tmp_path):
    data = tmp_path / "data"
    for label in ("cat", "dog"):
        save(data / label / "0.png", image(0, 7, 9))
    with pytest.raises(ValueError, match="7x9 px .* 8 to 256; image_size .--image_size"):
        read(data, tmp_path)


def test_damaged_images_are_all_named_and_nothing_is_kept(tmp_path):
    data = tmp_path / "data"
    fill(data, "cat", "dog")
    whole = (data / "cat" / "0.png").read_bytes()
    for number in range(11):
        (data / "cat" / f"a{number:02}.png").write_bytes(whole[:100] if number else b"text")
    (data / "dog" / "empty.jpg").write_bytes(b"")
    with pytest.raises(sources.UnusableFilesError) as error:
        read(data, tmp_path)
    first, *lines = str(error.value).splitlines()
    assert first.startswith(f"12 files in {data} cannot be used")
    assert lines[0] == "  cat/a00.png: it is no PNG or JPEG image, or damaged"
    assert lines[1].startswith("  cat/a01.png: ") and len(lines) == 11
    assert lines[-1] == "  and 2 more"
    assert not list((tmp_path / "cache").iterdir())


def test_images_are_read_once(tmp_path, monkeypatch):
    data, cache = tmp_path / "data", tmp_path / "cache"
    fill(data, "cat", "dog", "dog")
    first, _ = read(data, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(PIL.Image, "open", None)
        again, sizes = read(data, tmp_path)
        np.testing.assert_array_equal(again, first)
        assert sizes is None
    # A file that changes, even in place and to the same size, is read again, and replaces the old.
    status = (data / "dog" / "1.png").stat()
    save(data / "dog" / "1.png", image(9))
    os.utime(data / "dog" / "1.png", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    changed, _ = read(data, tmp_path)
    np.testing.assert_array_equal(changed[1], image(9))
    np.testing.assert_array_equal(first[1], image(1))  # Whoever has the old one keeps it.
    assert len(list(cache.iterdir())) == 1
    # Another size is kept beside it.
    read(data, tmp_path, image_size=8)
    assert len(list(cache.iterdir())) == 2
    # One that is cut off is read again.
    (kept,) = (f for f in cache.iterdir() if np.load(f, mmap_mode="r").shape[1] == 10)
    wanted = changed.copy()
    kept.write_bytes(kept.read_bytes()[:-1])
    np.testing.assert_array_equal(read(data, tmp_path)[0], wanted)


def test_folder_for_the_images_that_is_not_writable(tmp_path):
    data = tmp_path / "data"
    fill(data, "cat", "dog")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(sources.DataNotFoundError, match="data_dir .--data_dir."):
        read(data, tmp_path)


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    data = tmp_path / "data"
    fill(data, "cat", "dog")
    own_data.open_source(data).images.read(None, None)
    (kept,) = (tmp_path / ".cache" / "tff_fedlabel").iterdir()
    assert np.load(kept).shape == (2, 10, 10, 3)
