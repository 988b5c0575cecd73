"""Names of clients and classes that a formula, a table or a page could take for something else."""

import shutil

import numpy as np
import pandas as pd
import pytest

from tff_fedlabel import training
from tff_fedlabel.datasets import federated, partition_plot
from tff_fedlabel.training import client_accuracy, partition_table, pictures, prediction

# No formulas, as Matplotlib would find; left out of a legend; missing values, as pandas would find.
ODD = ("$_$", "$\\frac$", "_a", "NA", "007", "<i>&", 'q"\r\n,', "日本")


@pytest.fixture
def clients():
    number = len(ODD)
    y = np.arange(4 * number) % number
    x = np.zeros((len(y), 4, 4, 1), np.uint8)
    owners = [ODD[k // 4] for k in range(len(y))]
    flags = np.arange(len(y)) % 2 == 0
    return federated.from_arrays(x, y, owners, flags, hidden_y=y, label_names=ODD)


def test_partition(clients, tmp_path):
    partition_plot.plot_partition(clients, tmp_path / "p.png", title="$_$")
    table = partition_table.of_clients(clients)
    table.write(tmp_path / "p.csv")
    found = partition_table.read(tmp_path / "p.csv")
    assert found.label_names == ODD and found.client_ids == tuple(sorted(ODD))


def test_a_partition_that_is_no_table(tmp_path):
    (tmp_path / "p.csv").write_bytes(b"a\rb,c\n")
    with pytest.raises(ValueError, match="is not a table of clients and classes"):
        partition_table.read(tmp_path / "p.csv")


def test_accuracy_by_client_in_a_report(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    rows = pd.DataFrame({"client": ODD, "images": 3, "accuracy": 0.5, "part": "labeled"})
    client_accuracy.write(rows, run)
    stored = training.StoredRun(run).client_accuracy
    assert stored["client"].tolist() == list(ODD)
    training.write_report([run], tmp_path / "r.html")


def test_predictions(tmp_path):
    """Names of files may be any bytes."""
    files = ["a.png", "b\udcff.png"]
    probabilities = np.eye(len(ODD), dtype=np.float32)[:2]
    made = prediction.Prediction(
        "file", files, probabilities, np.array([0, 1]), ODD, [], resized=0, recolored=0
    )
    made.write(tmp_path / "p.csv", all_classes=True)
    assert b"b\xff.png,$\\frac$,1.000000" in (tmp_path / "p.csv").read_bytes()
    pictures.save(pictures.confusion(made.confusion(), ODD, "title"), tmp_path / "c.png")


@pytest.mark.parametrize("names", [False, True])
def test_classes_of_rows(tmp_path, names):
    x, y = np.zeros((3, 4, 4, 1), np.uint8), np.array([2, -1, 0])
    given = np.array([*ODD, ""])[y] if names else y
    np.savez(tmp_path / "x.npz", x=x, y=given)
    assert prediction.find_images(tmp_path / "x.npz", ODD).labels.tolist() == [2, -1, 0]


def test_one_array_where_several_should_be(tmp_path):
    with (tmp_path / "x.npz").open("wb") as file:
        np.save(file, np.zeros((3, 4, 4, 1), np.uint8))
    with pytest.raises(prediction.ImagesError, match="x.npz cannot be read"):
        prediction.find_images(tmp_path / "x.npz", ODD)


DAMAGE = {
    "metrics.csv": ["a\n1\n", "round,test_accuracy\n,0.5\n", "round,seconds\n1,a\n2,b\n"],
    "summary.json": ["[]", '"x"'],
    "client_accuracy.csv": [
        *("a,b\n1,2\n", "client,accuracy\nx,0.5\n"),
        "client,images,accuracy,part\na,1,x,labeled\n",
    ],
    "config.json": ['{"runtimes": {}}', '{"runtimes": ["a"]}', '{"versions": []}'],
}


@pytest.mark.parametrize(
    "name,content", [(name, content) for name, contents in DAMAGE.items() for content in contents]
)
def test_damaged_files_of_a_report(trained, tmp_path, name, content):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / name).write_text(content)
    with pytest.raises(training.RunDirectoryError, match=f"{name} is damaged") as caught:
        training.write_report([run], tmp_path / "r.html")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        '{"task": "x"}',
        '{"task": "x", "model": "cnn"}',
        '{"model": [1], "seed": 0, "algorithm": []}',
    ],
)
def test_a_configuration_without_its_model(trained, tmp_path, content):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "config.json").write_text(content)
    with pytest.raises(training.RunDirectoryError, match="config.json does not say which"):
        training.load_model(run)
