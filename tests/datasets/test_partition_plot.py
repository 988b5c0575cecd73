import numpy as np
import pytest
from PIL import Image

from tff_fedlabel.datasets import federated, partition_plot


def _data(hidden=True):
    # Client 0: labelled classes 0, 0; unlabelled 0, 1. Client 1: labelled 2; unlabelled 1, 1.
    # Client 2: labelled only.
    y = np.array([0, 0, 0, 1, 2, 1, 1, 2])
    x = np.zeros((8, 4, 4, 1), np.uint8)
    labeled = np.array([1, 1, 0, 0, 1, 0, 0, 1], bool)
    ids = [0, 0, 0, 0, 1, 1, 1, 2]
    return federated.from_arrays(x, y, ids, labeled, hidden_y=y if hidden else None)


def test_class_mismatch():
    np.testing.assert_allclose(partition_plot.class_mismatch(_data()), [0.5, 1.0, np.nan])


def test_picture_is_written(tmp_path):
    path = tmp_path / "new" / "picture.png"
    partition_plot.plot_partition(_data(), path, title="t", clients_shown=2)
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert pixels.shape == (1100, 1200, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50  # bars, map and legend are there


def test_many_classes(tmp_path):
    n = 300
    y = np.arange(n) % 100
    x = np.zeros((n, 4, 4, 1), np.uint8)
    data = federated.from_arrays(x, y, np.arange(n) // 100, np.arange(n) % 3 == 0, hidden_y=y)
    partition_plot.plot_partition(data, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="clients_shown"):
        partition_plot.plot_partition(_data(), tmp_path / "p.png", clients_shown=0)
    with pytest.raises(ValueError, match="not known"):
        partition_plot.plot_partition(_data(hidden=False), tmp_path / "p.png")
