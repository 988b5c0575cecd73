"""Files of several kinds and sizes become arrays of one shape."""

import numpy as np
import pytest
from PIL import Image

from tff_fedlabel.datasets import fitting_images

RNG = np.random.default_rng(0)
COLOR = RNG.integers(0, 256, (6, 5, 3)).astype(np.uint8)
GREY = RNG.integers(0, 256, (6, 5)).astype(np.uint8)


def saved(tmp_path, image, name="a.png", **options):
    image.save(tmp_path / name, **options)
    return tmp_path / name


def test_pixels_of_the_right_size_and_kind_are_left_alone(tmp_path):
    found = fitting_images.read(saved(tmp_path, Image.fromarray(COLOR)), (6, 5, 3))
    np.testing.assert_array_equal(found.pixels, COLOR)
    assert found[1:] == (False, False) and found.pixels.dtype == np.uint8
    found = fitting_images.read(saved(tmp_path, Image.fromarray(GREY)), (6, 5, 1))
    np.testing.assert_array_equal(found.pixels[..., 0], GREY)
    assert found[1:] == (False, False)


def test_grey_and_colours(tmp_path):
    found = fitting_images.read(saved(tmp_path, Image.fromarray(GREY)), (6, 5, 3))
    np.testing.assert_array_equal(found.pixels, np.repeat(GREY[..., None], 3, 2))
    assert found.recolored
    found = fitting_images.read(saved(tmp_path, Image.fromarray(COLOR)), (6, 5, 1))
    luma = COLOR @ np.array([0.299, 0.587, 0.114])  # ITU-R 601
    np.testing.assert_allclose(found.pixels[..., 0], luma, atol=1)
    assert found.recolored


def test_other_sizes_are_averaged_not_sampled():
    fine = np.tile(np.uint8([0, 255]), (16, 8))  # A grid finer than the target.
    found = fitting_images.fit(fine, (4, 4, 1))
    assert found.resized and found.pixels.shape == (4, 4, 1)
    np.testing.assert_allclose(found.pixels[:, 1:-1], 127.5, atol=8)


def test_kinds_of_png(tmp_path):
    deep = (GREY.astype(np.uint16) << 8) + GREY
    found = fitting_images.read(saved(tmp_path, Image.fromarray(deep)), (6, 5, 1))
    np.testing.assert_allclose(found.pixels[..., 0], GREY, atol=1)
    assert not found.recolored
    clear = np.dstack([COLOR, np.full((6, 5), 9, np.uint8)])
    found = fitting_images.read(saved(tmp_path, Image.fromarray(clear)), (6, 5, 3))
    np.testing.assert_array_equal(found.pixels, COLOR)
    palette = Image.fromarray(COLOR).quantize(256)
    found = fitting_images.read(saved(tmp_path, palette), (6, 5, 3))
    np.testing.assert_array_equal(found.pixels, np.asarray(palette.convert("RGB")))


def test_pictures_are_turned_as_the_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 3  # Upside down.
    path = saved(tmp_path, Image.fromarray(COLOR), "a.png", exif=exif)
    np.testing.assert_array_equal(fitting_images.read(path, (6, 5, 3)).pixels, COLOR[::-1, ::-1])


def test_unreadable_files(tmp_path):
    whole = saved(tmp_path, Image.fromarray(np.tile(COLOR, (20, 20, 1)))).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.png").touch()
    for name in ("cut.png", "text.jpg", "empty.png", "missing.png"):
        with pytest.raises(fitting_images.UnreadableImageError) as caught:
            fitting_images.read(tmp_path / name, (6, 5, 3))
        assert 3 < len(str(caught.value)) <= 80 and "\n" not in str(caught.value)


def test_find(tmp_path):
    for name in ("b/x.PNG", "b/c/y.jpeg", "a.jpg", "notes.txt", ".hidden/z.png", "b/.z.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    found = [path.relative_to(tmp_path).as_posix() for path in fitting_images.find(tmp_path)]
    assert found == ["a.jpg", "b/c/y.jpeg", "b/x.PNG"]
