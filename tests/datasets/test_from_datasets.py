"""Clients from `tf.data`."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fedlabel._validation import WrongTypeError
from tff_fedlabel.datasets import federated

N, CLASSES = 60, 5


def _arrays():
    """Image i is filled with the value i, so that a batch tells which images it holds."""
    x = np.broadcast_to(np.arange(N, dtype=np.uint8)[:, None, None, None], (N, 4, 4, 1)).copy()
    client_ids = np.array([f"client{i % 3}" for i in range(N)])
    return x, np.arange(N) % CLASSES, client_ids, np.arange(N) % 4 == 0


def _call(data, client, round_num=0, labeled_steps=None):
    return data.client_dataset(
        client, round_num, labeled_steps=labeled_steps, unlabeled_steps=None, batch_size=4
    )


def _rows(dataset):
    return [batch["x"][:, 0, 0, 0].tolist() for batch in dataset.as_numpy_iterator()]


def _datasets():
    x, y, client_ids, labeled = _arrays()
    datasets = {}
    for client in ("client2", "client0", "client1"):
        own = client_ids == client
        datasets[client] = (
            tf.data.Dataset.from_tensor_slices({"x": x[own & labeled], "y": y[own & labeled]}),
            tf.data.Dataset.from_tensor_slices({"x": x[own & ~labeled]}),
        )
    return datasets


def test_from_datasets_equals_from_arrays():
    data = federated.from_datasets(_datasets())
    same = federated.from_arrays(*_arrays())
    assert data.client_ids == same.client_ids and data.num_classes == CLASSES
    assert data.sizes().equals(same.sizes())
    assert data.element_spec() == same.element_spec()
    for client in data.client_ids:
        a, b = (_call(d, client, 2, labeled_steps=3) for d in (data, same))
        for part in ("labeled", "unlabeled"):
            assert _rows(a[part]) == _rows(b[part])


def test_from_datasets_reads_once():
    reads = []

    def images():
        reads.append(1)
        yield from ({"x": np.full((4, 4, 1), i, np.uint8), "y": i} for i in range(3))

    dataset = tf.data.Dataset.from_generator(
        images,
        output_signature={
            "x": tf.TensorSpec([4, 4, 1], tf.uint8),
            "y": tf.TensorSpec([], tf.int64),
        },
    )
    data = federated.from_datasets({7: (dataset, None), 3: (None, None)})
    for round_num in range(3):
        assert sorted(sum(_rows(_call(data, 7, round_num)["labeled"]), [])) == [0, 1, 2]
    assert data.client_ids == [3, 7] and len(reads) == 1
    assert data.sizes().total.tolist() == [0, 3]


def _from(x, y=None):
    return tf.data.Dataset.from_tensor_slices({"x": x} if y is None else {"x": x, "y": y})


X, Y = _arrays()[0][:6], _arrays()[1][:6]
BAD_DATASETS = {
    "float64": ((_from(X / 255.0, Y), None), "x", "dtype is float64"),
    "batched": ((_from(X, Y).batch(2), None), "x", "unbatch"),
    "no channel axis": ((_from(X[..., 0], Y), None), "x", "single images"),
    "two channels": ((_from(np.repeat(X, 2, -1), Y), None), "x", "1 or 3 channels"),
    "labels missing": ((_from(X), None), "y", "missing from the labeled elements"),
    "images missing": ((None, tf.data.Dataset.from_tensor_slices({"z": X})), "x", "missing"),
    "tuples": ((tf.data.Dataset.from_tensor_slices((X, Y)), None), "x", r"not dict\(x=, y=\)"),
    "float labels": ((_from(X, Y.astype("f4")), None), "y", "dtype is float32"),
    "label columns": ((_from(X, Y[:, None]), None), "y", "shape of an element"),
    "label -1": ((_from(X, Y * 0 - 1), None), "y", "label -1"),
    "label 5": ((_from(X, Y + 2), None), "y", r"label 5 of image 3 is not 0\.\.4"),
    "NaN": ((None, _from(np.full(X.shape, np.nan, np.float32))), "x", "image 0 holds NaN"),
    "above 1": ((None, _from(X.astype(np.float32))), "x", r"in \[0, 1\]"),
    "other shape": ((None, _from(np.zeros((2, 5, 5, 1), np.uint8))), "x", r"\[5, 5, 1\] where"),
    "other dtype": ((None, _from(np.zeros((2, 4, 4, 1), np.float32))), "x", "float32 .* where"),
    "endless": ((_from(X, Y).repeat(), None), "x", "is infinite"),
    "an array": ((X, None), "x", "not a tf.data.Dataset"),
    "one dataset": (_from(X, Y), "x", r"give \(labelled, unlabelled\)"),
    "three datasets": ((None, None, None), "x", r"give \(labelled, unlabelled\)"),
}


@pytest.mark.parametrize("case", BAD_DATASETS)
def test_from_datasets_refuses(case):
    parts, field, message = BAD_DATASETS[case]
    datasets = {"alice": (_from(X, Y), None), "bob": parts}
    with pytest.raises(federated.ClientDataError, match=message) as error:
        federated.from_datasets(datasets, num_classes=CLASSES)
    assert (error.value.client_id, error.value.field) == ("bob", field)
    assert "'bob'" in str(error.value) and "\n" not in str(error.value)


def test_from_datasets_refuses_mixed_ids():
    datasets = {1: (_from(X, Y), None), "a": (_from(X, Y), None)}
    with pytest.raises(federated.ClientDataError, match=r"1 \(int\) and .*'a' \(str\)"):
        federated.from_datasets(datasets)
    with pytest.raises(WrongTypeError, match="^datasets must be a dict"):
        federated.from_datasets([(_from(X, Y), None)])
