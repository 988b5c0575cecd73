import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tff_fedlabel.datasets import _medmnist, sources


def test_digits(no_network):
    source = sources.load("digits", seed=1)
    parts = (source.train, source.validation, source.test)
    assert [len(part) for part in parts] == [1439, 89, 269]
    assert source.train.x.shape == (1439, 8, 8, 1) and source.train.x.dtype == np.uint8
    assert source.num_classes == 10 and source.label_names == tuple("0123456789")
    # Gray levels 0..16 at equal distances over 0..255.
    levels = {int(v) for part in parts for v in np.unique(part.x)}
    assert levels == {round(level * 255 / 16) for level in range(17)}
    published = load_digits()
    whole = {
        (np.rint(image * 255 / 16).astype(np.uint8).tobytes(), int(label))
        for image, label in zip(published.images, published.target, strict=True)
    }
    found = {
        (image.tobytes(), int(label))
        for part in parts
        for image, label in zip(part.x, part.y, strict=True)
    }
    assert found == whole


def test_digits_has_no_official_split():
    with pytest.raises(ValueError, match="no published test set"):
        sources.load("digits", split="official")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("fashion-mnist", "fashion_mnist"),
        ("CIFAR10", "cifar10"),
        ("organmnist", "organamnist"),
        ("digit", "digits"),
    ],
)
def test_unknown_name_gets_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'"):
        sources.load(name)


def test_other_arguments_are_checked():
    with pytest.raises(ValueError, match="^split must"):
        sources.load("digits", split="half")
    with pytest.raises(ValueError, match="^seed must"):
        sources.load("digits", seed=-1)


def test_names():
    assert set(sources.NAMES) == {
        *("digits", "emnist", "cifar10", "cifar100", "fashion_mnist"),
        *("organamnist", "bloodmnist"),
    }


def test_medmnist_info_comes_without_the_package(capsys):
    info = _medmnist._medmnist_info.__wrapped__()
    assert info["organamnist"]["label"]["6"] == "liver"
    assert info["bloodmnist"]["MD5"] == "7053d0359d879ad8a5505303e11de1dc"
    assert "torch" not in sys.modules and "medmnist" not in sys.modules
    assert capsys.readouterr().out == ""
