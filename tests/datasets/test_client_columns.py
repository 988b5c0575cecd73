"""The forms in which `from_arrays` takes its columns, and those that it refuses."""

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tff_fedlabel.datasets import _own_arrays, federated, sources

N = 12
X = np.zeros((N, 4, 4, 1), np.uint8)
X[:, 0, 0, 0] = np.arange(N)
Y = np.arange(N) % 3
LABELED = np.arange(N) % 2 == 0
IDS = ["b", "a", "c", "a"] * 3


def _data(x=X, y=Y, client_ids=IDS, labeled=LABELED, **keywords):
    return federated.from_arrays(x, y, client_ids, labeled, **keywords)


def _labels(data):
    """{image: label} of all labelled images, read from the clients' batches."""
    found = {}
    for client in data.client_ids:
        batches = data.client_dataset(
            client, 0, labeled_steps=None, unlabeled_steps=None, batch_size=5
        )
        for batch in batches["labeled"].as_numpy_iterator():
            found.update(zip(batch["x"][:, 0, 0, 0].tolist(), batch["y"].tolist(), strict=True))
    return found


EXPECTED = {i: i % 3 for i in range(0, N, 2)}


def _owners(data):
    """{client: sorted images}, read from the clients' batches."""
    owners = {}
    for client in data.client_ids:
        batches = data.client_dataset(
            client, 0, labeled_steps=None, unlabeled_steps=None, batch_size=5
        )
        parts = [
            batch["x"][:, 0, 0, 0].tolist()
            for part in batches.values()
            for batch in part.as_numpy_iterator()
        ]
        owners[client] = sorted(sum(parts, []))
    return owners


def _by_hand(ids):
    return {client: [i for i in range(N) if ids[i] == client] for client in sorted(set(ids))}


HASHES = [2**63 + 5, 7, 2**64 - 1, 2**63 - 1] * 3
NUMBERS = [3, 1, 2, 1] * 3

GOOD_IDS = {
    "list of str": (IDS, IDS),
    "tuple": (tuple(IDS), IDS),
    "array of str": (np.array(IDS), IDS),
    "array of objects": (np.array(IDS, object), IDS),
    "list of NumPy strings": (list(np.array(IDS)), IDS),
    "pandas strings": (pd.Series(IDS, dtype="string"), IDS),
    "pandas objects": (pd.Series(IDS, dtype=object), IDS),
    "categories": (pd.Series(IDS, dtype="category"), IDS),
    "a Categorical": (pd.Categorical(IDS), IDS),
    "an Index": (pd.Index(IDS), IDS),
    "rows of a shuffled frame": (pd.Series(IDS, index=range(N, 0, -1)), IDS),
    "list of int": (NUMBERS, NUMBERS),
    "NumPy's and Python's int": ([np.int32(3), 1, np.uint64(2), 1] * 3, NUMBERS),
    "int32": (np.array(NUMBERS, np.int32), NUMBERS),
    "nullable integers": (pd.Series(NUMBERS, dtype="Int64"), NUMBERS),
    "categories of int": (pd.Series(NUMBERS, dtype="category"), NUMBERS),
    "a tensor": (tf.constant(NUMBERS), NUMBERS),
    "hashes": (HASHES, HASHES),
    "hashes as uint64": (np.array(HASHES, np.uint64), HASHES),
}


@pytest.mark.parametrize("case", GOOD_IDS)
def test_ids(case):
    given, meant = GOOD_IDS[case]
    data = _data(client_ids=given)
    assert data.client_ids == sorted(set(meant))
    assert {type(client) for client in data.client_ids} == {type(meant[0])}
    assert _owners(data) == _by_hand(meant)
    assert data.sizes().client_id.tolist() == data.client_ids


def _with(value, row=4):
    return [*IDS[:row], value, *IDS[row + 1 :]]


BAD_IDS = {
    "a number among strings": (_with(1), r"entry 0 is 'b' \(str\) and entry 4 is 1 \(int\)"),
    "a string among numbers": ([1, "a", 2] * 4, r"entry 0 is 1 \(int\) and entry 1 is 'a' \(str\)"),
    "a bool among numbers": ([True, 1, 2] * 4, r"True \(bool\) and entry 1 is 1 \(int\)"),
    "bools": ([True, False] * 6, r"entry 0 is True \(bool\); give all"),
    "array of bools": (np.arange(N) % 2 == 0, r"\(bool\); give all str or all integers"),
    "floats": (np.arange(N) / 1.0, r"entry 0 is 0.0 \(float\); give all"),
    "bytes": ([b"a", b"b"] * 6, r"entry 0 is b'a' \(bytes\)"),
    "None": (_with(None), r"entry 4 is missing \(None\)"),
    "NaN": (_with(float("nan")), r"entry 4 is missing \(nan\)"),
    "pandas string missing": (pd.Series(_with(None), dtype="string"), "entry 4 is missing"),
    "category missing": (pd.Series(_with(None), dtype="category"), "entry 4 is missing"),
    "nullable integer missing": (pd.Series([1, 2, None] * 4, dtype="Int64"), "entry 2 is missing"),
    "lists": ([["a"]] * N, r"entry 0 is \['a'\] \(list\)"),
    "two columns": (np.zeros((N, 2), int), r"shape is \[12, 2\]; give \[n\]"),
    "one string": ("abcdefghijkl", "one id for each image"),
    "a number": (3, "one id for each image"),
    "too few": (IDS[:-1], "11 entries for 12 images"),
}


@pytest.mark.parametrize("case", BAD_IDS)
def test_ids_refused(case):
    given, message = BAD_IDS[case]
    with pytest.raises(federated.ClientDataError, match=message) as error:
        _data(client_ids=given)
    assert error.value.field == "client_ids" and "\n" not in str(error.value)


GAPS = [None if i % 2 else i % 3 for i in range(N)]

GOOD_LABELS = {
    "floats": Y.astype(float),
    "floats with NaN": pd.Series(GAPS, dtype=float),
    "array of floats with NaN": np.array(GAPS, np.float32),
    "nonsense where unlabelled": np.where(LABELED, Y, 0.5),
    "infinity where unlabelled": np.where(LABELED, Y, np.inf),
    "nullable integers": pd.Series(Y, dtype="Int64"),
    "nullable integers with NA": pd.Series(GAPS, dtype="Int64"),
    "nullable integer array": pd.array(GAPS, dtype="Int8"),
    "nullable floats with NA": pd.Series(GAPS, dtype="Float64"),
    "categories of int": pd.Series(Y, dtype="category"),
    "uint8": Y.astype(np.uint8),
    "list": Y.tolist(),
}


@pytest.mark.parametrize("case", GOOD_LABELS)
def test_labels(case):
    given = GOOD_LABELS[case]
    data = _data(y=given)
    assert data.num_classes == 3
    assert _labels(data) == EXPECTED
    assert data.class_counts("labeled").sum(axis=0).tolist() == [2, 2, 2]


def _labels_with(value, row=4):
    labels = Y.astype(float)
    labels[row] = value
    return labels


# Image 4 is b's and labelled, image 5 is a's and not.
BAD_LABELS = {
    "NaN": (_labels_with(np.nan), "b", "image 4 has no label; give one, or set labeled to False"),
    "NA": (pd.Series([*range(4), None, *range(7)], dtype="Int64"), "b", "image 4 has no label"),
    "a half": (_labels_with(0.5), "b", "label 0.5 of image 4 is not a whole number"),
    "infinity": (_labels_with(np.inf), "b", "label inf of image 4 is too large"),
    "negative": (_labels_with(-1), "b", r"label -1 of image 4 is not 0\.\."),
    "huge": (_labels_with(2.0**40), "b", "is too large"),
    "huge integer": (Y + 2**40, "b", "label 1099511627776 of image 0 is not"),
    "objects": (np.array(GAPS, object), None, r'dtype is object; .*\.astype\("Int64"\)'),
    "list with None": (GAPS, None, "dtype is object"),
    "names": (np.array(["cat", "dog"] * 6), None, "pandas.factorize"),
    "pandas names": (pd.Series(["cat", "dog"] * 6, dtype=object), None, "pandas.factorize"),
    "booleans with NA": (pd.array([True, None] * 6, dtype="boolean"), None, "entry 1 is missing"),
    "ragged": ([[1], [1, 2]] * 6, None, "entries differ in length"),
}


@pytest.mark.parametrize("case", BAD_LABELS)
def test_labels_refused(case):
    given, client, message = BAD_LABELS[case]
    with pytest.raises(federated.ClientDataError, match=message) as error:
        _data(y=given)
    assert (error.value.client_id, error.value.field) == (client, "y")
    assert "\n" not in str(error.value)


def test_hidden_labels_may_be_nullable_but_not_missing():
    data = _data(hidden_y=pd.Series(Y, dtype="Int64"))
    assert data.hidden_y.tolist() == Y.tolist() and data.hidden_y.dtype == np.int32
    missing = pd.Series([*Y[:5], None, *Y[6:]], dtype="Int64")
    with pytest.raises(federated.ClientDataError, match="image 5 has no label; give one$") as error:
        _data(hidden_y=missing)
    assert (error.value.client_id, error.value.field) == ("a", "hidden_y")


def test_flags():
    for flags in (LABELED.tolist(), pd.Series(LABELED), pd.Series(LABELED, dtype="boolean")):
        assert _labels(_data(labeled=flags)) == EXPECTED
    with pytest.raises(federated.ClientDataError, match="entry 1 is missing") as error:
        _data(labeled=pd.array([True, None] * 6, dtype="boolean"))
    assert error.value.field == "labeled"


def test_images_in_a_list():
    assert _labels(_data(x=list(X))) == EXPECTED


@pytest.mark.parametrize(
    ("size", "text"),
    [((4, 5, 1), r"\[4, 5, 1\]"), ((4, 4), r"\[4, 4\]"), ((5, 4, 3), r"\[5, 4, 3\]")],
)
@pytest.mark.parametrize("form", [list, lambda images: pd.Series(images)])
def test_images_of_different_sizes(size, text, form):
    images = list(X)
    images[6] = np.zeros(size, np.uint8)
    message = rf"image 6 has shape {text} and image 0 \[4, 4, 1\]; resize"
    with pytest.raises(federated.ClientDataError, match=message) as error:
        _data(x=form(images))
    assert (error.value.client_id, error.value.field) == ("c", "x")
    assert "\n" not in str(error.value)


GAP = np.arange(N) == 3
MASKED = {
    "x": (np.ma.masked_array(X, np.broadcast_to(GAP[:, None, None, None], X.shape)), "x.filled(0)"),
    "y": (np.ma.masked_array(Y, GAP), "y.astype(float).filled(np.nan)"),
    "labeled": (np.ma.masked_array(LABELED, GAP), "labeled.filled(False)"),
    "hidden_y": (np.ma.masked_array(Y, GAP), "leave hidden_y out"),
    "client_ids": (np.ma.masked_array(np.arange(N), GAP), "entry 3 is missing"),
}


@pytest.mark.parametrize("field", MASKED)
def test_gaps_of_masked_arrays_are_refused(field):
    given, words = MASKED[field]
    with pytest.raises(federated.ClientDataError) as error:
        _data(**{field: given})
    assert words in str(error.value) and "\n" not in str(error.value)
    assert error.value.field == field
    if field != "client_ids":
        assert f"{given.mask.sum()} masked entries" in str(error.value)


def test_masked_arrays_without_gaps_are_arrays():
    assert _labels(_data(x=np.ma.masked_array(X), y=np.ma.masked_array(Y))) == EXPECTED


def test_what_the_message_says_makes_masked_labels_usable():
    """Masked are images 1, 3, ..., which have no label; the labels below are the test's own."""
    masked = np.ma.masked_array(Y, ~LABELED)
    with pytest.raises(federated.ClientDataError, match="6 masked entries"):
        _data(y=masked)
    assert _labels(_data(y=masked.astype(float).filled(np.nan))) == EXPECTED


def test_masked_images_of_other_sources_are_refused():
    masked = sources.Examples(*(MASKED[field][0] for field in ("x", "y")))
    for examples in (masked, sources.Examples(X, masked.y)):
        with pytest.raises(federated.ClientDataError, match="masked entries"):
            federated.from_source(examples, [np.arange(N)], 0.5)
    with pytest.raises(federated.ClientDataError, match="masked entries"):
        _own_arrays.list_arrays({"x_train": X[..., 0], "y_train": masked.y}, "mine")


def test_other_images_refused():
    rows = [[[0] * 4] * 4] * 6 + [[[0] * 4, [0] * 3]] * 6
    message = r"image 6 has shape \[2, None\] and image 0 \[4, 4\]"
    with pytest.raises(federated.ClientDataError, match=message):
        _data(x=rows)
    with pytest.raises(federated.ClientDataError, match=r"dtype is object; .*np\.stack"):
        _data(x=pd.Series(list(X)))
    with pytest.raises(federated.ClientDataError, match="generator without a length"):
        _data(x=(image for image in X))
    with pytest.raises(federated.ClientDataError, match="there are no images"):
        _data(x=[], y=[], client_ids=[], labeled=[])
