"""TFF's ClientData as clients, and clients as a ClientData."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel.datasets import federated, partition

RNG = np.random.default_rng(0)
SIZES = {"cy": 5, "ann": 8, "bob": 3}
IMAGES = {c: RNG.integers(0, 256, (n, 9, 10)).astype(np.uint8) for c, n in SIZES.items()}
LABELS = {c: RNG.integers(0, 3, n) for c, n in SIZES.items()}
LABELS["bob"][0] = 2


def client_data(image="pixels", label="label", change=lambda x: (x / 255).astype(np.float32)):
    slices = {c: {image: change(IMAGES[c]), label: LABELS[c]} for c in SIZES}
    return tff.simulation.datasets.TestClientData(slices)


def batches(data, client):
    options = dict(labeled_steps=None, unlabeled_steps=None, batch_size=100)
    parts = data.client_dataset(client, 0, **options, with_hidden_labels=True)
    return {k: next(iter(part.as_numpy_iterator())) for k, part in parts.items()}


def pairs(x, y):
    return sorted((image.tobytes(), int(label)) for image, label in zip(x, y, strict=True))


def test_images_labels_and_ids_are_those_of_the_client_data():
    data = federated.from_client_data(client_data(), 0.5, seed=2)
    assert data.client_ids == ["ann", "bob", "cy"] and data.num_classes == 3
    for k, client in enumerate(data.client_ids):
        x = (IMAGES[client] / 255).astype(np.float32)[..., None]
        labeled, _ = partition.split_labeled(np.arange(SIZES[client]), 0.5, 2, k)
        hidden = np.setdiff1d(np.arange(SIZES[client]), labeled)
        found = batches(data, client)
        for part, rows in (("labeled", labeled), ("unlabeled", hidden)):
            got = found[part]
            assert pairs(got["x"], got["y"]) == pairs(x[rows], LABELS[client][rows])


def test_other_names_and_bytes():
    data = federated.from_client_data(
        client_data("image", "digit", lambda x: np.repeat(x[..., None], 3, -1)),
        1.0,
        image_key="image",
        label_key="digit",
        label_names=["a", "b", "c", "d"],
    )
    assert data.input_spec["x"] == tf.TensorSpec([None, 9, 10, 3], tf.uint8)
    assert data.num_classes == 4 and data.sizes()["unlabeled"].sum() == 0


@pytest.mark.parametrize(
    "made,options,words",
    [
        (lambda: client_data("image"), {}, ["'ann'", "no 'pixels'", "'image'", "image_key"]),
        (lambda: client_data(label="y"), {}, ["no 'label'", "label_key"]),
        (lambda: client_data(change=lambda x: x * 1.0), {}, ["'ann'", "float64"]),
        (lambda: client_data(change=lambda x: x.astype(np.float32)), {}, ["in [0, 1]"]),
        (client_data, {"num_classes": 2}, ["label 2"]),
        (client_data, {"labeled_fraction": 0}, ["labeled_fraction"]),
        (dict, {}, ["client_data must be a tff.simulation.datasets.ClientData"]),
    ],
)
def test_client_data_that_does_not_fit(made, options, words):
    with pytest.raises(ValueError) as error:
        federated.from_client_data(made(), **{"labeled_fraction": 0.5, **options})
    for word in words:
        assert word in str(error.value)


@pytest.fixture(scope="module")
def data():
    x = np.concatenate([IMAGES[c] for c in SIZES])[..., None]
    y = np.concatenate([LABELS[c] for c in SIZES])
    owners = [c for c, n in SIZES.items() for _ in range(n)]
    return federated.from_arrays(x, y, owners, np.arange(16) % 3 > 0, num_classes=3)


LABELED = {
    c: (np.arange(16) % 3 > 0)[start : start + SIZES[c]]
    for c, start in zip(SIZES, (0, 5, 13), strict=True)
}


@pytest.mark.parametrize("part", ["labeled", "unlabeled", "all"])
def test_out_as_client_data(data, part):
    """Eagerly, by TFF's own lists, and from one graph."""
    out = data.to_client_data(part)
    assert isinstance(out, tff.simulation.datasets.ClientData)
    assert out.client_ids == ["ann", "bob", "cy"]
    assert len(list(out.datasets(seed=1))) == 3
    in_graph = tf.function(lambda c: list_of(out.serializable_dataset_fn(c).batch(100)))
    for client in out.client_ids:
        dataset = out.create_tf_dataset_for_client(client)
        assert dataset.element_spec == out.element_type_structure
        (eager,) = dataset.batch(100).as_numpy_iterator()
        assert isinstance(eager, collections.OrderedDict)
        has_label = LABELED[client]
        chosen = {"labeled": has_label, "unlabeled": ~has_label, "all": has_label | True}[part]
        images = IMAGES[client][chosen][..., None]
        labels = np.where(has_label, LABELS[client], -1)[chosen]
        if part == "unlabeled":
            assert set(eager) == {"x"}
            labels = eager["y"] = np.zeros(len(images))
        assert pairs(eager["x"], eager["y"]) == pairs(images, labels)
        for column, other in zip(in_graph(tf.constant(client)), eager.values(), strict=False):
            np.testing.assert_array_equal(column, other)
    with pytest.raises(ValueError, match="client_id 'zoe' is unknown"):
        out.create_tf_dataset_for_client("zoe")
    with pytest.raises(tf.errors.InvalidArgumentError, match="no such client"):
        in_graph(tf.constant("zoe"))


def list_of(dataset):
    element = dataset.get_single_element()
    return [element[name] for name in element]


@pytest.mark.usefixtures("local_runtime")
def test_what_tff_builds_on_it(data):
    out = data.to_client_data()
    brighter = out.preprocess(lambda d: d.map(lambda e: (e["x"] + 1, e["y"])))
    (x, _), *_ = brighter.create_tf_dataset_for_client("bob").batch(9).as_numpy_iterator()
    np.testing.assert_array_equal(x[..., 0], IMAGES["bob"][LABELED["bob"]] + np.uint8(1))
    together = out.create_tf_dataset_from_all_clients(seed=0)
    assert len(list(together)) == sum(LABELED[c].sum() for c in SIZES)
    with pytest.raises(ValueError, match="part 'some' is unknown"):
        data.to_client_data("some")

    @tff.tensorflow.computation(out.dataset_computation.type_signature.result)
    def count(dataset):
        return dataset.reduce(0, lambda n, _: n + 1)

    assert count(out.create_tf_dataset_for_client("cy")) == LABELED["cy"].sum()
    assert len(list(out.dataset_computation("cy"))) == LABELED["cy"].sum()


def test_too_many_images_for_a_graph(data, monkeypatch):
    out = data.to_client_data("all")
    monkeypatch.setattr("tff_fedlabel.datasets._tff_clients._IN_ONE_GRAPH", 16 * 94 - 1)
    with pytest.raises(ValueError, match="do not fit into one graph"):
        _ = out.serializable_dataset_fn
    monkeypatch.setattr("tff_fedlabel.datasets._tff_clients._IN_ONE_GRAPH", 16 * 94)
    assert out.serializable_dataset_fn
