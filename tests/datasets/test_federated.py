import hashlib

import numpy as np
import pytest
import tensorflow as tf

from tff_fedlabel._validation import WrongTypeError
from tff_fedlabel.datasets import federated
from tff_fedlabel.datasets.sources import Examples

N, CLASSES = 60, 5


def _arrays(n=N, clients=3):
    """Image i is filled with the value i, so that a batch tells which images it holds."""
    x = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, 4, 4, 1)).copy()
    y = np.arange(n) % CLASSES
    client_ids = np.array([f"client{i % clients}" for i in range(n)])
    labeled = np.arange(n) % 4 == 0
    return x, y, client_ids, labeled


def _data(**keywords):
    return federated.from_arrays(*_arrays(), **keywords)


def _batches(dataset):
    return list(dataset.as_numpy_iterator())


def _rows(dataset):
    return [batch["x"][:, 0, 0, 0].tolist() for batch in _batches(dataset)]


def _call(data, client="client1", round_num=0, **changes):
    keywords = {"labeled_steps": None, "unlabeled_steps": None, "batch_size": 4, **changes}
    return data.client_dataset(client, round_num, **keywords)


def _own(client=1):
    """Rows of one client, by hand: (labelled, unlabelled)."""
    rows = [i for i in range(N) if i % 3 == client]
    return [i for i in rows if i % 4 == 0], [i for i in rows if i % 4]


def test_members():
    data = _data()
    assert data.client_ids == ["client0", "client1", "client2"]
    assert data.num_classes == CLASSES and data.label_names == ("0", "1", "2", "3", "4")
    sizes = data.sizes()
    assert list(sizes.columns) == ["client_id", "labeled", "unlabeled", "total"]
    assert sizes.values.tolist() == [[f"client{k}", 5, 15, 20] for k in range(3)]
    expected = [[sum(i % CLASSES == c for i in _own(k)[0]) for c in range(CLASSES)] for k in (0, 1)]
    assert data.class_counts("labeled")[:2].tolist() == expected
    assert data.input_spec["x"] == tf.TensorSpec([None, 4, 4, 1], tf.uint8)


def test_one_pass_gives_every_image_once():
    labeled, unlabeled = _own()
    batches = _call(_data())
    first, second = _rows(batches["labeled"]), _rows(batches["unlabeled"])
    assert sorted(sum(first, [])) == labeled and sorted(sum(second, [])) == unlabeled
    assert [len(b) for b in first] == [4, 1] and [len(b) for b in second] == [4, 4, 4, 3]


def test_labels_stay_with_their_images():
    for batch in _batches(_call(_data(), labeled_steps=7)["labeled"]):
        np.testing.assert_array_equal(batch["y"], batch["x"][:, 0, 0, 0] % CLASSES)
        assert batch["x"].dtype == np.uint8 and batch["y"].dtype == np.int32


def test_steps_are_full_batches_of_whole_passes_in_new_order():
    labeled, unlabeled = _own()
    batches = _call(_data(), labeled_steps=6, unlabeled_steps=2, unlabeled_batch_size=3)
    rows = _rows(batches["labeled"])
    assert [len(b) for b in rows] == [4] * 6
    flat = sum(rows, [])
    passes = [flat[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(one) == labeled for one in passes)
    assert len({tuple(one) for one in passes}) > 1
    rows = _rows(batches["unlabeled"])
    assert [len(b) for b in rows] == [3, 3]
    assert len(set(sum(rows, []))) == 6 and set(sum(rows, [])) <= set(unlabeled)


def test_order_is_a_function_of_seed_round_and_client():
    def order(data, client="client1", round_num=3, seed=1):
        batches = _call(data, client, round_num, seed=seed)
        return _rows(batches["labeled"]), _rows(batches["unlabeled"])

    first = order(_data())
    assert order(_data()) == first
    assert order(_data(), round_num=4) != first
    assert order(_data(), seed=2) != first
    # The same rows under another name: the order within must not be the same.
    x, y, client_ids, labeled = _arrays()
    renamed = np.where(client_ids == "client1", "other", client_ids)
    assert order(federated.from_arrays(x, y, renamed, labeled), client="other") != first
    # Reading the other part or other clients first changes nothing.
    data = _data()
    order(data, "client0"), order(data, "client2", 9)
    assert order(data) == first


def test_order_is_the_same_in_every_process():
    # Resumed runs depend on it. Written out again here: a key of seed, round, a hash of the id
    # that does not change from process to process, and the part.
    digest = hashlib.blake2b(b"client1", digest_size=8).digest()
    client = sum(byte << (8 * k) for k, byte in enumerate(digest))
    for part, (name, rows) in enumerate(zip(("labeled", "unlabeled"), _own(), strict=True)):
        rng = np.random.default_rng(np.random.SeedSequence((9, 5, client, part)))
        expected = rng.permutation(rows).tolist()
        assert sum(_rows(_call(_data(), round_num=5, seed=9)[name]), []) == expected


def test_clients_without_a_part():
    x, y, client_ids, labeled = _arrays()
    labeled = labeled & (client_ids != "client1")
    data = federated.from_arrays(x, y, client_ids, labeled | (client_ids == "client2"))
    for client, part in (("client1", "labeled"), ("client2", "unlabeled")):
        for steps in (None, 3):
            batches = _call(data, client, labeled_steps=steps, unlabeled_steps=steps)
            assert _batches(batches[part]) == []
    spec = data.element_spec()
    for client in data.client_ids:
        batches = _call(data, client)
        assert {k: v.element_spec for k, v in batches.items()} == dict(spec)
        assert list(batches) == ["labeled", "unlabeled"]


def test_client_with_nothing_at_all():
    examples = Examples(*_arrays()[:2])
    data = federated.from_source(examples, [np.arange(10), np.zeros(0, int)], 0.5)
    assert data.sizes().values.tolist() == [[0, 5, 5, 10], [1, 0, 0, 0]]
    batches = _call(data, 1, labeled_steps=2, unlabeled_steps=2)
    assert _batches(batches["labeled"]) == [] and _batches(batches["unlabeled"]) == []


def test_hidden_labels_come_only_when_asked_for():
    data = _data(hidden_y=_arrays()[1])
    assert list(_call(data)["unlabeled"].element_spec) == ["x"]
    shown = _call(data, with_hidden_labels=True)["unlabeled"]
    assert shown.element_spec == data.element_spec(with_hidden_labels=True)["unlabeled"]
    assert _rows(shown) == _rows(_call(data)["unlabeled"])
    for batch in _batches(shown):
        np.testing.assert_array_equal(batch["y"], batch["x"][:, 0, 0, 0] % CLASSES)


def test_unlabeled_y_is_ignored():
    x, y, client_ids, labeled = _arrays()
    wild = np.where(labeled, y, -(10**9))
    data = federated.from_arrays(x, wild, client_ids, labeled)
    assert data.num_classes == CLASSES
    for client in data.client_ids:
        a, b = _call(data, client), _call(_data(), client)
        assert _rows(a["unlabeled"]) == _rows(b["unlabeled"])
        for one, two in zip(_batches(a["labeled"]), _batches(b["labeled"]), strict=True):
            np.testing.assert_array_equal(one["y"], two["y"])


def test_all_labeled():
    data = _data(hidden_y=_arrays()[1]).all_labeled()
    assert data.sizes()[["labeled", "unlabeled"]].values.tolist() == [[20, 0]] * 3
    batches = _batches(_call(data)["labeled"])
    rows = np.concatenate([batch["x"][:, 0, 0, 0] for batch in batches])
    assert sorted(rows) == sorted(sum(_own(), []))
    np.testing.assert_array_equal(np.concatenate([b["y"] for b in batches]), rows % CLASSES)


@pytest.mark.parametrize(
    "use",
    [
        lambda data: data.all_labeled(),
        lambda data: data.class_counts("unlabeled"),
        lambda data: _call(data, with_hidden_labels=True),
    ],
)
def test_unknown_hidden_labels_are_refused(use):
    with pytest.raises(ValueError, match="not known"):
        use(_data())


def test_from_source_hides_labels_and_reports_classes():
    x, y, _, _ = _arrays()
    parts = [np.arange(0, 40), np.arange(40, 55)]
    data = federated.from_source(Examples(x, y), parts, 0.2, seed=3, label_names=list("abcde"))
    assert data.client_ids == [0, 1] and data.label_names == tuple("abcde")
    assert data.sizes().values.tolist() == [[0, 8, 32, 40], [1, 3, 12, 15]]
    expected = [np.bincount(y[part], minlength=CLASSES).tolist() for part in parts]
    assert data.class_counts().tolist() == expected
    total = data.class_counts("labeled") + data.class_counts("unlabeled")
    assert total.tolist() == expected
    assert sorted(
        sum(_rows(_call(data, 1)["unlabeled"]) + _rows(_call(data, 1)["labeled"]), [])
    ) == (list(range(40, 55)))
    again = federated.from_source(Examples(x, y), parts, 0.2, seed=3)
    other = federated.from_source(Examples(x, y), parts, 0.2, seed=4)
    assert _rows(_call(again, 0)["labeled"]) == _rows(_call(data, 0)["labeled"])
    assert _rows(_call(other, 0)["labeled"]) != _rows(_call(data, 0)["labeled"])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1], [1, 2]], "twice; image 1 is repeated"),
        ([[0, 0]], "twice"),
        ([[60]], "row numbers"),
        ([[-1]], "row numbers"),
        ([], "at least one client"),
        ([[0.5, 1.5]], r"parts must hold row numbers, .* got float64"),
        ([[[0], [1]]], r"parts must hold row numbers, .* got int64 \[2, 1\]"),
    ],
)
def test_from_source_refuses_parts(parts, message):
    with pytest.raises(ValueError, match=message):
        federated.from_source(Examples(*_arrays()[:2]), parts, 0.5)


def test_integer_client_ids_are_in_numeric_order():
    x, y, _, labeled = _arrays()
    ids = np.where(np.arange(N) % 2, 10, 9)
    data = federated.from_arrays(x, y, ids, labeled)
    assert data.client_ids == [9, 10] and all(type(c) is int for c in data.client_ids)
    assert sorted(sum(_rows(_call(data, np.int64(9))["labeled"]), [])) == list(range(0, N, 4))


def test_flat_features_and_float_images():
    rng = np.random.default_rng(0)
    _, y, client_ids, labeled = _arrays()
    flat = rng.normal(size=(N, 7)).astype(np.float32)
    data = federated.from_arrays(flat, y, client_ids, labeled)
    assert data.input_spec["x"] == tf.TensorSpec([None, 7], tf.float32)
    batch = _batches(_call(data)["labeled"])[0]
    assert (batch["x"][:, None] == flat[None]).all(-1).any(1).all()
    images = rng.random((N, 8, 8, 3), np.float32)
    data = federated.from_arrays(images, y, client_ids, labeled)
    assert data.input_spec["x"] == tf.TensorSpec([None, 8, 8, 3], tf.float32)


def _float_with(value, row=13):
    x = np.full((N, 4, 4, 1), 0.5, np.float32)
    x[row, 1, 2, 0] = value
    return x


def _labels_with(value, row=16):
    y = _arrays()[1]
    y[row] = value
    return y


# Row 13 is client1's (unlabelled), row 16 is client1's (labelled).
BAD_ARRAYS = {
    "float64": ({"x": np.zeros((N, 4, 4, 1))}, None, "x", "dtype is float64"),
    "int images": ({"x": np.zeros((N, 4, 4, 1), int)}, None, "x", "dtype is int64"),
    "no channel axis": ({"x": np.zeros((N, 4, 4), np.uint8)}, None, "x", "channel axis"),
    "two channels": ({"x": np.zeros((N, 4, 4, 2), np.uint8)}, None, "x", "1 or 3 channels"),
    "no features": ({"x": np.zeros(N, np.uint8)}, None, "x", "shape is"),
    "no images": ({"x": np.zeros((0, 4, 4, 1), np.uint8)}, None, "x", "no images"),
    "NaN": ({"x": _float_with(np.nan)}, "client1", "x", "image 13 holds NaN"),
    "infinity": ({"x": _float_with(np.inf)}, "client1", "x", "image 13 holds NaN or infinity"),
    "above 1": ({"x": _float_with(255)}, "client1", "x", "image 13 has values"),
    "below 0": ({"x": _float_with(-0.1)}, "client1", "x", "image 13 has values"),
    "NaN feature": ({"x": _float_with(np.nan).reshape(N, -1)}, "client1", "x", "image 13"),
    "bool labels": ({"y": np.zeros(N, bool)}, None, "y", "dtype is bool; give integers"),
    "column of labels": ({"y": np.zeros((N, 1), int)}, None, "y", "shape is"),
    "label missing": ({"y": _labels_with(-1)}, "client1", "y", "label -1 of image 16"),
    "label too large": (
        {"y": _labels_with(5), "num_classes": 5},
        "client1",
        "y",
        r"label 5 of image 16 is not 0\.\.4",
    ),
    "fewer labels": ({"y": np.zeros(N - 1, int)}, None, "y", "59 entries for 60 images"),
    "fewer clients": ({"client_ids": ["a"]}, None, "client_ids", "1 entries for 60 images"),
    "float clients": ({"client_ids": np.zeros(N)}, None, "client_ids", "all str or all integers"),
    "more flags": ({"labeled": np.zeros(N + 1, bool)}, None, "labeled", "61 entries"),
    "int flags": ({"labeled": np.zeros(N, int)}, None, "labeled", "dtype is int64"),
    "nothing labelled": ({"labeled": np.zeros(N, bool)}, None, "y", "num_classes"),
    "hidden label": ({"hidden_y": _labels_with(-1, 13)}, "client1", "hidden_y", "image 13"),
    "hidden label differs": ({"hidden_y": _labels_with(0)}, "client1", "hidden_y", "differs"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_from_arrays_refuses(case):
    change, client, field, message = BAD_ARRAYS[case]
    arguments = dict(zip(("x", "y", "client_ids", "labeled"), _arrays(), strict=True)) | change
    with pytest.raises(federated.ClientDataError, match=message) as error:
        federated.from_arrays(**arguments)
    assert (error.value.client_id, error.value.field) == (client, field)
    text = str(error.value)
    assert repr(field) in text and "\n" not in text
    assert client is None or repr(client) in text


def test_label_names_must_fit():
    with pytest.raises(ValueError, match="^label_names must have one name for each of 5"):
        _data(num_classes=5, label_names=["a", "b"])
    for names in ("abcde", 5, iter("abcde")):
        with pytest.raises(WrongTypeError, match="^label_names must be a list with one name"):
            _data(label_names=names)
    for names in ([], list("abcda")):
        with pytest.raises(ValueError, match="^label_names must be different names"):
            _data(label_names=names)
    assert _data(label_names=np.array(list("abcde"))).label_names == tuple("abcde")


def test_clients_of_a_cohort_are_a_sequence():
    for clients in (0, "client1"):
        with pytest.raises(WrongTypeError, match="^clients must be a sequence of client ids"):
            _data().cohort(clients, 0, labeled_steps=1, unlabeled_steps=1, batch_size=4)


@pytest.mark.parametrize("steps", ["labeled_steps", "unlabeled_steps"])
def test_a_round_of_one_client_has_a_size(steps):
    with pytest.raises(ValueError, match=f"^{steps} x batch_size is .* at most 16777216 images"):
        _call(_data(), **{steps: 2**12, "batch_size": 2**13})
    with pytest.raises(ValueError, match="^labeled_steps x batch_size is"):
        _call(_data(), batch_size=2**31 - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labeled_steps": 0}, "labeled_steps"),
        ({"unlabeled_steps": -1}, "unlabeled_steps"),
        ({"labeled_steps": 1.5}, "labeled_steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"unlabeled_batch_size": 0}, "unlabeled_batch_size"),
        ({"round_num": -1}, "round_num"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**31}, "seed"),
        ({"client": "nobody"}, "nobody"),
        ({"client": "client3"}, r"'client3' is unknown \(did you mean 'client"),
    ],
)
def test_client_dataset_refuses(change, message):
    with pytest.raises(ValueError, match=message) as error:
        _call(_data(), **change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"labeled_steps": 1.0},
        {"unlabeled_steps": "1"},
        {"batch_size": True},
        {"unlabeled_batch_size": np.float32(1)},
        {"round_num": None},
        {"seed": 0.5},
        {"with_hidden_labels": 1},
    ],
)
def test_client_dataset_refuses_types(change):
    (name,) = change
    with pytest.raises(WrongTypeError, match=f"^{name} must be"):
        _call(_data(hidden_y=_arrays()[1]), **change)


@pytest.mark.parametrize("client", [True, 1.0, None, ["client1"]])
def test_client_dataset_refuses_ids_of_other_types(client):
    x, y, _, labeled = _arrays()
    data = federated.from_arrays(x, y, np.arange(N) % 3, labeled)
    with pytest.raises(WrongTypeError, match="^client_id must be"):
        _call(data, client)


def test_numpy_numbers_are_numbers():
    def rows(number):
        choices = {
            "labeled_steps": number(2),
            "unlabeled_steps": number(3),
            "batch_size": number(4),
            "unlabeled_batch_size": number(5),
            "seed": number(6),
        }
        parts = _call(_data(), np.str_("client1"), number(7), **choices).values()
        return [_rows(part) for part in parts]

    assert rows(np.uint8) == rows(np.int64) == rows(int)
    data = _data(num_classes=np.int16(7))
    assert data.num_classes == 7 and type(data.num_classes) is int


def test_evaluation_dataset():
    x, y, _, _ = _arrays()
    batches = _batches(federated.evaluation_dataset(Examples(x, y.astype(np.int32)), 25))
    assert [len(batch["y"]) for batch in batches] == [25, 25, 10]
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in batches]), x)
    np.testing.assert_array_equal(np.concatenate([b["y"] for b in batches]), y)
    with pytest.raises(ValueError, match="batch_size"):
        federated.evaluation_dataset(Examples(x, y), 0)
