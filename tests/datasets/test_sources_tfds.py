"""Reading tensorflow-datasets' prepared form: small hand-written files, and the real ones."""

import json
import shutil
import time
import urllib.error

import numpy as np
import pytest
import tensorflow as tf

from tff_fedlabel.datasets import _tfds, sources

_FEATURES = "tensorflow_datasets.core.features."


def write_prepared(root, builder, version, splits, num_classes, label_names=None):
    """Writes {split: [shard of (images, labels)]} the way tensorflow-datasets lays it out."""
    name, _, config = builder.partition("/")
    folder = root / builder / version
    folder.mkdir(parents=True)
    shape = next(iter(splits.values()))[0][0].shape[1:]
    info = {
        "name": name,
        "version": version,
        "fileFormat": "tfrecord",
        "splits": [
            {
                "name": split,
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "numBytes": "1",
                "shardLengths": [str(len(labels)) for _, labels in shards],
            }
            for split, shards in splits.items()
        ],
    }
    if config:
        info["configName"] = config
    (folder / "dataset_info.json").write_text(json.dumps(info))
    features = {
        "image": {
            "pythonClassName": _FEATURES + "image_feature.Image",
            "image": {"dtype": "uint8", "shape": {"dimensions": [str(n) for n in shape]}},
        },
        "label": {
            "pythonClassName": _FEATURES + "class_label_feature.ClassLabel",
            "classLabel": {"numClasses": str(num_classes)},
        },
    }
    (folder / "features.json").write_text(
        json.dumps(
            {
                "pythonClassName": _FEATURES + "features_dict.FeaturesDict",
                "featuresDict": {"features": features},
            }
        )
    )
    if label_names:
        (folder / "label.labels.txt").write_text("\n".join(label_names) + "\n")
    for split, shards in splits.items():
        for number, (images, labels) in enumerate(shards):
            file = f"{name}-{split}.tfrecord-{number:05d}-of-{len(shards):05d}"
            with tf.io.TFRecordWriter(str(folder / file)) as writer:
                for image, label in zip(images, labels, strict=True):
                    writer.write(_example(image, label))
    return folder


def _example(image, label):
    feature = {
        "image": tf.train.Feature(
            bytes_list=tf.train.BytesList(value=[tf.io.encode_png(image).numpy()])
        ),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def _shard(n, shape, classes, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, *shape), np.uint8), rng.integers(0, classes, n)


def _cifar10(root):
    splits = {
        "train": [_shard(30, (32, 32, 3), 10, 0), _shard(20, (32, 32, 3), 10, 1)],
        "test": [_shard(10, (32, 32, 3), 10, 2)],
    }
    return splits, write_prepared(root, "cifar10", "3.0.2", splits, 10)


def _join(shards):
    return tuple(np.concatenate(column) for column in zip(*shards, strict=True))


def _multiset(x, y):
    return sorted((image.tobytes(), int(label)) for image, label in zip(x, y, strict=True))


def test_official_split_keeps_the_published_test_set(tmp_path, no_network):
    splits, _ = _cifar10(tmp_path)
    source = sources.load("cifar10", str(tmp_path), split="official", seed=4)
    test_x, test_y = _join(splits["test"])
    np.testing.assert_array_equal(source.test.x, test_x)
    np.testing.assert_array_equal(source.test.y, test_y)
    assert len(source.validation) == 2  # 5% of 50, halves down
    both = (
        np.concatenate([source.train.x, source.validation.x]),
        np.concatenate([source.train.y, source.validation.y]),
    )
    assert _multiset(*both) == _multiset(*_join(splits["train"]))
    assert source.train.x.dtype == np.uint8 and source.train.y.dtype == np.int32
    assert source.num_classes == 10 and source.label_names[3] == "cat"


def test_pooled_split_is_80_5_15_of_everything(tmp_path, no_network):
    splits, _ = _cifar10(tmp_path)
    source = sources.load("cifar10", str(tmp_path), seed=4, download=False)
    parts = (source.train, source.validation, source.test)
    assert [len(part) for part in parts] == [48, 3, 9]
    found = np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])
    assert _multiset(*found) == _multiset(*_join(splits["train"] + splits["test"]))
    again = sources.load("cifar10", str(tmp_path), seed=4)
    np.testing.assert_array_equal(again.test.x, source.test.x)
    other = sources.load("cifar10", str(tmp_path), seed=5)
    assert not np.array_equal(other.test.x, source.test.x)


def test_images_are_held_once(tmp_path):
    _cifar10(tmp_path)
    source = sources.load("cifar10", str(tmp_path))
    whole = source.train.x.base
    assert whole is source.validation.x.base is source.test.x.base
    assert whole.nbytes == 60 * 32 * 32 * 3


def test_emnist_is_turned_upright(tmp_path, no_network):
    images, labels = _shard(40, (28, 28, 1), 62, 0)
    stored = images.transpose(0, 2, 1, 3)
    splits = {"train": [(stored[:30], labels[:30])], "test": [(stored[30:], labels[30:])]}
    write_prepared(tmp_path, "emnist/byclass", "3.1.0", splits, 62)
    source = sources.load("emnist", str(tmp_path), split="official")
    np.testing.assert_array_equal(source.test.x, images[30:])
    assert source.num_classes == 62
    assert source.label_names[10] == "A" and source.label_names[36] == "a"


def test_cifar100_takes_label_names_from_the_files(tmp_path, no_network):
    names = [f"thing{k}" for k in range(100)]
    splits = {key: [_shard(20, (32, 32, 3), 100, 0)] for key in ("train", "test")}
    write_prepared(tmp_path, "cifar100", "3.0.2", splits, 100, names)
    assert sources.load("cifar100", str(tmp_path)).label_names == tuple(names)


def test_newest_version_is_read_and_cut_off_downloads_are_not(tmp_path):
    for version, seed in (("3.0.2", 0), ("3.0.10", 1)):
        splits = {key: [_shard(8, (28, 28, 1), 10, seed)] for key in ("train", "test")}
        write_prepared(tmp_path, "fashion_mnist", version, splits, 10)
    (tmp_path / "fashion_mnist" / "9.9.9.incompleteABC").mkdir()
    source = sources.load("fashion_mnist", str(tmp_path), split="official")
    np.testing.assert_array_equal(source.test.x, splits["test"][0][0])


def test_data_dir_defaults_to_the_environment(tmp_path, monkeypatch):
    _cifar10(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert len(sources.load("cifar10", download=False).train) == 48


def _flip_byte(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def _drop_last_record(path):
    records = [r.numpy() for r in tf.data.TFRecordDataset(str(path))]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records[:-1]:
            writer.write(record)


def _replace_records(path, image, label):
    count = sum(1 for _ in tf.data.TFRecordDataset(str(path)))
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _ in range(count):
            writer.write(_example(image, label))


SHARD = "cifar10-train.tfrecord-00001-of-00002"
DAMAGE = {
    "a byte of an image": lambda f: _flip_byte(f / SHARD, 5000),
    "cut within a record": lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-100]),
    "a record less": lambda f: _drop_last_record(f / SHARD),
    "a shard missing": lambda f: (f / SHARD).unlink(),
    "an empty shard": lambda f: (f / SHARD).write_bytes(b""),
    "no description": lambda f: (f / "dataset_info.json").unlink(),
    "no features": lambda f: (f / "features.json").unlink(),
    "half a description": lambda f: (f / "dataset_info.json").write_text('{"name": "cif'),
    "half the features": lambda f: (f / "features.json").write_text("{"),
    "a label of 10": lambda f: _replace_records(f / SHARD, np.zeros((32, 32, 3), np.uint8), 10),
    "a label of -1": lambda f: _replace_records(f / SHARD, np.zeros((32, 32, 3), np.uint8), -1),
    "small images": lambda f: _replace_records(f / SHARD, np.zeros((8, 8, 3), np.uint8), 1),
    "another data set": lambda f: (f / "features.json").write_text(
        (f / "features.json").read_text().replace('"numClasses": "10"', '"numClasses": "100"')
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(tmp_path, damage, no_network):
    _, folder = _cifar10(tmp_path)
    sources.load("cifar10", str(tmp_path))
    DAMAGE[damage](folder)
    with pytest.raises(sources.CorruptDataError) as error:
        sources.load("cifar10", str(tmp_path))
    assert str(error.value).startswith("cifar10: ") and "\n" not in str(error.value)


def test_missing_without_download(tmp_path, no_network):
    with pytest.raises(sources.DataNotFoundError) as error:
        sources.load("emnist", str(tmp_path), download=False)
    message = str(error.value)
    assert str(tmp_path / "emnist/byclass/3.1.0") in message and "\n" not in message
    assert "dataset_info.json" in message


def test_missing_and_no_network_is_told_at_once(tmp_path, monkeypatch):
    def unreachable(request, timeout):
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setattr(_tfds.urllib.request, "urlopen", unreachable)
    start = time.monotonic()
    with pytest.raises(sources.DataNotFoundError) as error:
        sources.load("cifar100", str(tmp_path))
    assert time.monotonic() - start < 5
    assert str(tmp_path / "cifar100/3.0.2") in str(error.value)
    assert "name resolution" in str(error.value) and "\n" not in str(error.value)


def test_download_prepares_and_reads(tmp_path, monkeypatch):
    ready = tmp_path / "ready"
    splits, _ = _cifar10(ready)
    target = tmp_path / "target"
    real = _tfds._import_tfds()

    class Builder:
        def download_and_prepare(self):
            shutil.copytree(ready, target, dirs_exist_ok=True)

    class Tfds:
        builder_from_directory = staticmethod(real.builder_from_directory)

        @staticmethod
        def builder(name, data_dir, try_gcs):
            assert (name, data_dir, try_gcs) == ("cifar10", str(target), False)
            return Builder()

    monkeypatch.setattr(_tfds, "_probe", lambda url: None)
    monkeypatch.setattr(_tfds, "_import_tfds", lambda: Tfds)
    source = sources.load("cifar10", str(target), split="official")
    np.testing.assert_array_equal(source.test.x, splits["test"][0][0])
    assert [path.name for path in target.iterdir()] == ["cifar10"]


@pytest.fixture
def decoded_once(monkeypatch):
    """The images of a split are decoded once, however often they are loaded."""
    read, kept = _tfds._read_split, {}

    def read_once(*arguments):
        split = arguments[-1]
        if split not in kept:
            kept[split] = list(read(*arguments))
        return iter(kept[split])

    monkeypatch.setattr(_tfds, "_read_split", read_once)


@pytest.mark.usefixtures("decoded_once")
def test_real_fashion_mnist(real_data_dir, no_network):
    source = sources.load("fashion_mnist", real_data_dir, download=False)
    assert source.train.x.shape == (56000, 28, 28, 1)
    assert (len(source.validation), len(source.test)) == (3500, 10500)
    y = np.concatenate([part.y for part in (source.train, source.validation, source.test)])
    assert np.bincount(y).tolist() == [7000] * 10
    official = sources.load("fashion_mnist", real_data_dir, split="official")
    assert np.bincount(official.test.y).tolist() == [1000] * 10
    # Published statistics of the training pixels: mean .2860, standard deviation .3530.
    x = np.concatenate([official.train.x, official.validation.x])
    assert x.mean() / 255 == pytest.approx(0.2860, abs=2e-4)
    assert x.std() / 255 == pytest.approx(0.3530, abs=2e-4)


def test_real_cifar10(real_data_dir, no_network):
    start = time.process_time()  # Which other programs of the machine do not lengthen.
    source = sources.load("cifar10", real_data_dir, split="official", download=False)
    assert time.process_time() - start < 60
    assert source.train.x.shape == (47500, 32, 32, 3) and len(source.validation) == 2500
    assert np.bincount(source.test.y).tolist() == [1000] * 10
    # Published channel means of the training pixels, which JPEG copies keep within .006.
    x = np.concatenate([source.train.x, source.validation.x])
    np.testing.assert_allclose(x.mean((0, 1, 2)) / 255, [0.4914, 0.4822, 0.4465], atol=6e-3)
