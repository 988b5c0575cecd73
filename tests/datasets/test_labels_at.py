"""Labels at every client, at the server, or at some of the clients."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fedlabel.datasets import federated, own_data, partition, partition_plot, server_labels
from tff_fedlabel.datasets.sources import Examples
from tff_fedlabel.training import partition_table

N, CLASSES = 60, 5
# Image i is filled with the value i.
X = np.broadcast_to(np.arange(N, dtype=np.uint8)[:, None, None, None], (N, 4, 4, 1)).copy()
Y = np.arange(N, dtype=np.int32) % CLASSES
PARTS = [np.arange(k, 50, 5) for k in range(4)] + [np.zeros(0, np.int64)]


def clients(labels_at="every_client", fraction=0.3, seed=0, parts=PARTS):
    return federated.from_source(Examples(X, Y), parts, fraction, seed, labels_at=labels_at)


def held(data, part):
    """Which images each client holds, by their pixels."""
    return [data.client_arrays(c, part)["x"][:, 0, 0, 0].tolist() for c in data.client_ids]


def test_the_server_has_what_the_clients_would_have():
    before, after = clients(), clients("server")
    assert held(after, "labeled") == [[]] * 5
    assert held(after, "unlabeled") == held(before, "unlabeled")
    at_server = after.labeled_arrays()
    rows = at_server["x"][:, 0, 0, 0]
    assert rows.tolist() == sum(held(before, "labeled"), []) and len(rows) == 4 * 3
    np.testing.assert_array_equal(at_server["y"], rows % CLASSES)
    # No image is at both places, and none is lost.
    everything = sum(held(after, "unlabeled"), []) + rows.tolist()
    assert sorted(everything) == sorted(np.concatenate(PARTS).tolist())
    sizes = after.sizes()
    assert sizes["labeled"].tolist() == [0] * 5
    assert sizes["unlabeled"].tolist() == [7, 7, 7, 7, 0]
    assert "12 labelled images at the server" in repr(after)
    options = {"labeled_steps": 3, "unlabeled_steps": 2, "batch_size": 4}
    batches = after.client_dataset(0, 1, **options)
    assert list(batches["labeled"]) == [] and len(list(batches["unlabeled"])) == 2
    assert batches["labeled"].element_spec == before.client_dataset(0, 1, **options)["labeled"].element_spec  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    "fraction, number", [(0.01, 1), (0.2, 1), (0.3, 2), (0.5, 3), (0.79, 4), (1.0, 4)]
)
def test_some_clients_have_all_labels_and_the_others_none(fraction, number):
    """Of five clients, halves up; the one without images is never among them."""
    data = clients("some_clients", fraction)
    labeled, unlabeled = held(data, "labeled"), held(data, "unlabeled")
    assert sum(map(bool, labeled)) == number
    for part, own, others in zip(PARTS, labeled, unlabeled, strict=True):
        assert sorted(own + others) == part.tolist() and not (own and others)
    np.testing.assert_array_equal(data.labeled_arrays()["y"], np.array(sum(labeled, [])) % CLASSES)


def test_which_clients_have_labels_is_drawn_by_the_seed():
    counts = np.zeros(5)
    for seed in range(200):
        chosen = partition.choose_labeled_clients(PARTS, 0.4, seed)
        np.testing.assert_array_equal(chosen, partition.choose_labeled_clients(PARTS, 0.4, seed))
        assert chosen.sum() == 2
        counts += chosen
    assert counts[4] == 0
    assert (np.abs(counts[:4] - 100) < 30).all()  # Four standard deviations.
    with pytest.raises(ValueError, match="labeled_fraction"):
        partition.choose_labeled_clients(PARTS, 0.0)


def test_fingerprints_tell_them_apart():
    found = [clients(place).fingerprint() for place in ("every_client", "server", "some_clients")]
    found += [clients("server", seed=1).fingerprint(), clients("server", 0.4).fingerprint()]
    assert len(set(found)) == 5
    assert clients("server").fingerprint() == found[1]


def test_labels_that_are_at_the_server_already_stay_there():
    data = clients("server")
    assert server_labels.move_to_server(data) is data
    np.testing.assert_array_equal(data.hidden_y, Y)


def test_tables_and_pictures(tmp_path):
    for place in ("server", "some_clients"):
        data = clients(place)
        table = partition_table.of_clients(data)
        table.write(tmp_path / "table.csv")
        read = partition_table.read(tmp_path / "table.csv")
        for found in (table, read):
            np.testing.assert_array_equal(found.labeled, data.class_counts("labeled"))
            np.testing.assert_array_equal(found.unlabeled, data.class_counts("unlabeled"))
            if place == "server":
                expected = np.bincount(data.labeled_arrays()["y"], minlength=data.num_classes)
                np.testing.assert_array_equal(found.server, expected)
            else:
                assert found.server is None
        assert np.isnan(partition_plot.class_mismatch(data)).all()
        picture = tmp_path / f"{place}.png"
        partition_plot.plot_partition(data, picture)
        assert picture.stat().st_size > 10000


def test_unknown_places_are_refused():
    with pytest.raises(ValueError, match="^labels_at 'servers' is unknown .did you mean server"):
        clients("servers")


def own(labels_at, unlabeled, **columns):
    y = np.where(np.arange(N) % 4 == 0, -1, Y) if unlabeled else Y
    x = np.repeat(np.repeat(X, 2, axis=1), 2, axis=2)

    def made():
        return {"x": x, "y": y, **columns}

    options = {"num_clients": 3, "alpha": 10.0, "labeled_fraction": 0.4, "seed": 1}
    return own_data.load(made, "mine", labels_at=labels_at, **options)


def test_own_data(tmp_path):
    source, data = own("server", False)
    assert data.sizes()["labeled"].sum() == 0
    _, before = own("every_client", False)
    for name, values in before.labeled_arrays().items():
        np.testing.assert_array_equal(data.labeled_arrays()[name], values)
    assert "moved to the server" in source.note
    source, data = own("some_clients", False)
    assert np.count_nonzero(data.sizes()["labeled"]) == 1
    assert "0.4 of the clients" in source.note
    # Data of which some images have no label says by itself which.
    _, data = own("server", True)
    assert data.sizes()["labeled"].sum() == 0 and data.sizes()["unlabeled"].sum() == N / 4
    assert isinstance(data, server_labels.LabelsAtServer)
    with pytest.raises(ValueError, match="^labels_at must not be 'some_clients' for mine"):
        own("some_clients", True)
    assert tf.executing_eagerly()
