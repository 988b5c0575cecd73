"""Images of all sorts through the model of a run, by the script."""

import csv

import numpy as np
import predict as script
import pytest
import trained_runs
from numpy_network import network
from PIL import Image
from scripts import run_script
from sklearn.datasets import load_digits

from tff_fedlabel import training
from tff_fedlabel.training import keras_model, pictures, prediction

DIGITS = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)[:40]
LABELS = load_digits().target[:40]


@pytest.fixture(scope="module")
def model(trained):
    return training.load_model(trained)


@pytest.fixture
def read_once(trained, model, monkeypatch):
    """The script gets the model as it was read before."""

    def load_model(run_dir, best, data_dir):
        assert (str(run_dir), best, data_dir) == (str(trained), False, None)
        return model

    monkeypatch.setattr(training, "load_model", load_model)


@pytest.fixture(scope="module")
def probabilities(trained, model):
    """[n, 10] of `DIGITS`, by NumPy from the weights of the checkpoint."""
    keras = model.keras
    names, number = list(keras_model.named_weights(keras)), len(keras.weights)
    weights = dict(zip(names, trained_runs.checkpoint(trained)[:number], strict=True))
    logits = network(keras_model.architecture(keras), weights, DIGITS[..., None] / 255)
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    found = exponentials / exponentials.sum(1, keepdims=True)
    assert len(set(found.argmax(1))) > 5
    return found


def run(*arguments):
    return run_script(script, script.predict, *arguments)


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_an_npz(trained, probabilities, tmp_path):
    np.savez(tmp_path / "images.npz", x=DIGITS, y=LABELS)
    output = tmp_path / "out" / "p.csv"
    code, out, err = run(trained, tmp_path / "images.npz", "--output", output, "--all_classes")
    assert (code, err) == (0, "")
    rows = table(output)
    assert [int(row["row"]) for row in rows] == list(range(40))
    assert [int(row["class"]) for row in rows] == probabilities.argmax(1).tolist()
    assert [int(row["label"]) for row in rows] == LABELS.tolist()
    for number in range(10):
        column = [float(row[f"p_{number}"]) for row in rows]
        np.testing.assert_allclose(column, probabilities[:, number], atol=2e-6)
    top = [float(row["probability"]) for row in rows]
    np.testing.assert_allclose(top, probabilities.max(1), atol=2e-6)
    accuracy = np.mean(probabilities.argmax(1) == LABELS)
    assert f"accuracy {accuracy:.4f} on 40 images" in out
    assert (output.parent / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert len(out.splitlines()) == 2


@pytest.mark.usefixtures("read_once")
def test_a_folder_with_names_of_classes(trained, probabilities, tmp_path):
    for index in range(20):
        # Half of the files lie in folders that are called like a class.
        folder = tmp_path / "in" / (str(LABELS[index]) if index < 10 else "unsorted")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(DIGITS[index]).save(folder / f"{index:02}.png")
    code, out, err = run(trained, tmp_path / "in", "--output", tmp_path / "p.csv")
    assert (code, err) == (0, "")
    rows = {row["file"].split("/")[1]: row for row in table(tmp_path / "p.csv")}
    for index in range(20):
        row = rows[f"{index:02}.png"]
        assert int(row["class"]) == probabilities[index].argmax()
        assert row["label"] == (str(LABELS[index]) if index < 10 else "")
    accuracy = np.mean(probabilities[:10].argmax(1) == LABELS[:10])
    assert f"accuracy {accuracy:.4f} on 10 images" in out and "resized" not in out


@pytest.mark.usefixtures("read_once")
def test_sizes_colours_and_damage_are_told(trained, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    Image.fromarray(np.kron(DIGITS[0], np.ones((4, 4), np.uint8))).save(folder / "large.png")
    Image.fromarray(np.repeat(DIGITS[1][..., None], 3, 2)).save(folder / "rgb.png")
    Image.fromarray(DIGITS[2]).save(folder / "right.png")
    for index in range(12):
        (folder / f"bad{index:02}.jpg").write_text("no image")
    code, out, err = run(trained, folder, "--output", tmp_path / "p.csv")
    assert code == 1
    lines = err.splitlines()
    assert (
        len(lines) == 10
        and lines[0] == "cannot read bad00.jpg: it is no PNG or JPEG image, or damaged"
    )
    assert lines[-1] == "cannot read 3 more"
    told = "of 3 images, 1 resized to 8x8 and 1 made grey, as the model takes them"
    assert out.splitlines() == [told, f"3 images: {tmp_path / 'p.csv'}"]
    assert [row["file"] for row in table(tmp_path / "p.csv")] == [
        *("large.png", "rgb.png", "right.png")
    ]
    assert not (tmp_path / "confusion.png").exists()


@pytest.mark.usefixtures("read_once")
def test_nothing_readable_writes_nothing(trained, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").touch()
    code, out, err = run(trained, tmp_path / "in", "--output", tmp_path / "p.csv")
    assert code == 1 and "nothing was classified" in err and not (tmp_path / "p.csv").exists()


def test_confusion_counts(model, probabilities):
    images = prediction.Images("row", list("abcd"), np.array([3, 3, -1, 1]), x=DIGITS[:4])
    counts = training.predict(model, images).confusion()
    expected = np.zeros((10, 10), int)
    for label, predicted in zip((3, 3, 1), probabilities[[0, 1, 3]].argmax(1), strict=True):
        expected[label, predicted] += 1
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize(
    "arrays,words",
    [
        ({"z": DIGITS}, "no array x"),
        ({"x": DIGITS / 255}, "float64, not uint8"),
        ({"x": DIGITS[0]}, "shape [8, 8]"),
        ({"x": DIGITS[..., None, None]}, "shape [40, 8, 8, 1, 1]"),
        ({"x": DIGITS[:0]}, "shape [0, 8, 8]"),
        ({"x": DIGITS, "y": LABELS[:3]}, "one whole number for each of the 40"),
        ({"x": DIGITS, "y": LABELS + 5}, "5 to 14, but the model has the classes 0 to 9"),
    ],
)
@pytest.mark.usefixtures("read_once")
def test_arrays_that_are_no_images(trained, tmp_path, arrays, words):
    np.savez(tmp_path / "images.npz", **arrays)
    code, out, err = run(trained, tmp_path / "images.npz", "--output", tmp_path / "p.csv")
    assert code == 2 and words in err and len(err.splitlines()) == 1 and not out


@pytest.mark.parametrize(
    "name,words",
    [
        ("nowhere", "nowhere does not exist"),
        ("nowhere.npz", "nowhere.npz does not exist"),
        ("empty", "empty holds no images"),
    ],
)
@pytest.mark.usefixtures("read_once")
def test_no_images(trained, tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    code, _, err = run(trained, tmp_path / name, "--output", tmp_path / "p.csv")
    assert code == 2 and words in err and len(err.splitlines()) == 1


@pytest.mark.usefixtures("read_once")
def test_what_is_there_is_replaced_only_on_request_and_then_wholly(trained, tmp_path):
    np.savez(tmp_path / "known.npz", x=DIGITS, y=LABELS)
    np.savez(tmp_path / "unknown.npz", x=DIGITS[:3])
    output, picture = tmp_path / "p.csv", tmp_path / "confusion.png"

    def classify(name, *flags):
        return run(trained, tmp_path / name, "--output", output, *flags)

    def check_refused(name, *flags):
        code, out, err = classify("unknown.npz", *flags)
        assert (code, out) == (2, "") and len(err.splitlines()) == 1
        assert f"{name} exists; --overwrite" in err

    code, _, err = run(trained, tmp_path / "known.npz", "--output", picture)
    assert code == 2 and "where the picture goes" in err and not picture.exists()
    assert classify("known.npz")[0] == 0 and picture.exists()
    check_refused("p.csv")
    assert len(table(output)) == 40
    assert classify("unknown.npz", "--overwrite")[0] == 0
    # The picture was of the images before.
    assert len(table(output)) == 3 and not picture.exists()
    output.unlink()
    picture.touch()
    check_refused("confusion.png")
    assert not output.exists()
    assert classify("known.npz", "--overwrite")[0] == 0
    assert picture.stat().st_size


@pytest.mark.usefixtures("read_once")
def test_a_folder_is_never_replaced_by_a_table(trained, tmp_path):
    np.savez(tmp_path / "images.npz", x=DIGITS[:3])
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "thesis.jpg").touch()
    where = ("--output", tmp_path / "photos", "--overwrite")
    code, _, err = run(trained, tmp_path / "images.npz", *where)
    assert code == 2 and "photos is there and is no file" in err
    assert (tmp_path / "photos" / "thesis.jpg").exists()


def test_a_missing_run_is_noticed_before_the_target(tmp_path):
    (tmp_path / "p.csv").touch()
    code, _, err = run(tmp_path / "nowhere", tmp_path, "--output", tmp_path / "p.csv")
    assert code == 2 and "nowhere holds no run" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("number", [2, 20, 47])
def test_names_and_numbers_of_the_picture_do_not_touch(number, tmp_path):
    """By what Matplotlib says about the boxes of its texts; and nothing is cut off at the edge."""
    names = [f"class number {index}" for index in range(number)]
    counts = 1234 * np.tri(number, dtype=int) * (np.arange(number) < 3)
    picture = pictures.confusion(counts, names, "title")
    pictures.save(picture, tmp_path / "picture.png")
    picture.draw_without_rendering()
    axes = picture.axes[0]
    cell = axes.transData.transform([1, 1]) - axes.transData.transform([0, 0])
    for text in axes.texts:
        box = text.get_window_extent()
        assert box.width <= abs(cell[0]) and box.height <= abs(cell[1])
    for axis in (axes.xaxis, axes.yaxis):
        boxes = [label.get_window_extent() for label in axis.get_ticklabels()]
        assert not any(a.overlaps(b) for a, b in zip(boxes, boxes[1:], strict=False))
        assert not any(box.overlaps(axis.label.get_window_extent()) for box in boxes)
    pixels = np.asarray(Image.open(tmp_path / "picture.png").convert("L"))
    for edge in (pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]):
        assert (edge == 255).all()
