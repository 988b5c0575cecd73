import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tff_fedlabel._validation import WrongTypeError
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
    with pytest.raises(
        ValueError, match=rf"is unknown \(did you mean {nearest}\?\); choose from: digits, "
    ):
        sources.load(name)


def test_other_arguments_are_checked():
    with pytest.raises(ValueError, match="^split 'half' is unknown"):
        sources.load("digits", split="half")
    for seed in (-1, 2**31):
        with pytest.raises(ValueError, match="^seed must"):
            sources.load("digits", seed=seed)


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"data_dir": 3},
        {"split": None},
        {"seed": 1.0},
        {"download": "no"},
        {"image_size": 8.0},
        {"image_size": True},
    ],
)
def test_types_are_checked(change):
    (field,) = change
    with pytest.raises(WrongTypeError, match=f"^{field} must be") as error:
        sources.load(**{"name": "digits", **change})
    assert "\n" not in str(error.value)


def test_numpy_seeds_are_seeds():
    sources_of = [sources.load("digits", seed=seed) for seed in (5, np.int32(5), np.uint64(5))]
    assert len({source.fingerprint() for source in sources_of}) == 1


def test_image_sizes():
    assert set(sources.IMAGE_SIZES) == set(sources.NAMES)
    assert sources.IMAGE_SIZES["bloodmnist"] == (28, 64, 128, 224)
    assert sources.load("digits", image_size=np.int64(8)).train.x.shape[1:] == (8, 8, 1)
    wrong = [("digits", 28, "8"), ("cifar10", 64, "32"), ("emnist", 64, "28")]
    wrong.append(("bloodmnist", 32, "28 or 64 or 128 or 224"))
    for name, size, known in wrong:
        message = f"^image_size must be {known} for {name}, got {size}.$"
        with pytest.raises(ValueError, match=message):
            sources.load(name, image_size=size, download=False)


def test_names():
    assert set(sources.NAMES) == {
        *("digits", "emnist", "cifar10", "cifar100", "fashion_mnist"),
        *("organamnist", "bloodmnist"),
    }


def test_medmnist_info_comes_without_the_package(capsys):
    info = _medmnist._medmnist_info.__wrapped__()
    assert info["organamnist"]["label"]["6"] == "liver"
    assert info["bloodmnist"]["MD5"] == "7053d0359d879ad8a5505303e11de1dc"
    for size in (64, 128, 224):
        assert info["organamnist"][f"url_{size}"].endswith(f"/organamnist_{size}.npz?download=1")
        assert len(info["bloodmnist"][f"MD5_{size}"]) == 32
    assert "torch" not in sys.modules and "medmnist" not in sys.modules
    assert capsys.readouterr().out == ""
