import numpy as np
import pytest

from tff_fedlabel.datasets import partition as partition_lib

ALPHAS = [0.01, 0.1, 1.0, 100.0, 1e12, float("inf")]


def _labels(n=6000, classes=10, seed=3):
    return np.random.default_rng(seed).integers(0, classes, n)


@pytest.mark.parametrize("scheme", partition_lib.SCHEMES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_image_is_used_twice(alpha, scheme):
    labels = _labels()
    parts = partition_lib.partition(labels, 40, alpha, scheme=scheme, seed=1)
    used = np.concatenate(parts)
    assert len(parts) == 40
    assert all(np.issubdtype(part.dtype, np.integer) for part in parts)
    assert len(np.unique(used)) == len(used) == 6000
    assert used.min() == 0 and used.max() == 5999
    assert all((np.diff(part) > 0).all() for part in parts)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_client_schemes_give_equal_sizes_and_leave_the_remainder(alpha):
    for scheme in ("client", "client_symmetric"):
        parts = partition_lib.partition(_labels(n=1439), 20, alpha, scheme=scheme)
        assert [len(part) for part in parts] == [71] * 20


def test_same_seed_same_parts_other_seed_other_parts():
    labels = _labels()
    for scheme in partition_lib.SCHEMES:
        first, again, other = (
            partition_lib.partition(labels, 10, 0.5, scheme=scheme, seed=seed) for seed in (0, 0, 1)
        )
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_skew_falls_with_alpha():
    labels = _labels(n=20000)
    for scheme in partition_lib.SCHEMES:
        spread = []
        for alpha in (0.01, 1.0, 100.0, float("inf")):
            parts = partition_lib.partition(labels, 20, alpha, scheme=scheme)
            counts = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
            class_shares = counts / counts.sum(axis=0, keepdims=True)
            spread.append(np.square(class_shares).sum(axis=0).mean())
        assert spread[0] > spread[1] > spread[2] > 0.99 * spread[3]
        # Drawn one by one, the mixtures' numbers of a class vary as a multinomial's do.
        slack = 0.05 if scheme == "client_symmetric" else 0.02
        assert spread[3] == pytest.approx(1 / 20, rel=slack)


def test_first_client_is_dirichlet_multinomial():
    # Nothing runs out for the first client here, so its count of class 0 (frequency p) has mean
    # m p and variance m p (1 - p) (m + a) / (1 + a), a the sum of the concentrations.
    labels = np.repeat([0, 1], [60, 120])
    m, p, alpha = 18, 1 / 3, 0.7
    counts = np.array(
        [
            np.sum(labels[partition_lib.partition(labels, 10, alpha, seed=seed)[0]] == 0)
            for seed in range(3000)
        ]
    )
    total = 2 * alpha
    variance = m * p * (1 - p) * (m + total) / (1 + total)
    assert counts.mean() == pytest.approx(m * p, abs=4 * np.sqrt(variance / 3000))
    assert counts.var() == pytest.approx(variance, rel=0.1)


def _first_clients(labels, alpha, scheme, trials, clients=20):
    """Class counts of the first client, whom nothing runs out for: [trials, classes]."""
    parts = (
        partition_lib.partition(labels, clients, alpha, scheme=scheme, seed=seed)[0]
        for seed in range(trials)
    )
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


@pytest.mark.parametrize(
    ("scheme", "concentration"),
    [
        # Dir(alpha) over the three classes that occur; Dir(alpha N p) with p = 1/6, 1/3, 1/2.
        ("client_symmetric", [0.8, 0.0, 0.8, 0.8]),
        ("client", [0.4, 0.0, 0.8, 1.2]),
    ],
)
def test_mixtures_of_unbalanced_classes(scheme, concentration):
    labels = np.repeat([0, 2, 3], [400, 800, 1200])
    trials, m = 3000, 24 * 5
    counts = _first_clients(labels, 0.8, scheme, trials)
    a = np.array(concentration)
    total = a.sum()
    mean = a / total
    # A multinomial of m images from a Dirichlet mixture: the Dirichlet's own moments
    # mean_i (d_ij - mean_j) / (total + 1), widened by the drawing of m.
    widened = m * (m + total) / (total + 1)
    covariance = widened * (np.diag(mean) - np.outer(mean, mean))
    assert (counts.sum(axis=1) == m).all() and (counts[:, 1] == 0).all()
    error = np.sqrt(np.diag(covariance) / trials)
    assert (np.abs(counts.mean(axis=0) - m * mean) <= 4.5 * error).all()
    np.testing.assert_allclose(np.cov(counts.T, bias=True), covariance, atol=0.1 * covariance.max())
    np.testing.assert_allclose(counts.var(axis=0), np.diag(covariance), rtol=0.1)


def test_symmetric_without_skew_is_even_until_a_class_ends():
    labels = np.repeat([0, 1], [100, 1100])
    counts = partition_lib.class_counts(
        partition_lib.partition(labels, 12, float("inf"), scheme="client_symmetric"), labels
    )
    # The first has half of each: mean 50, standard deviation 5. Then class 0 ends.
    assert 25 <= counts[0, 0] <= 75 and counts[3:].tolist() == [[0, 100]] * 9
    assert counts[:, 0].sum() == 100


def _one_by_one(labels, num_clients, alpha, rng):
    """Counts [clients, classes], drawn image by image, mixtures renormalised as classes end."""
    left = np.bincount(labels).astype(float)
    prior = left / left.sum()
    counts = np.zeros((num_clients, len(left)))
    for client in range(num_clients):
        mixture = rng.dirichlet(alpha * len(left) * prior)
        for _ in range(len(labels) // num_clients):
            mixture = np.where(left > 0, mixture, 0.0)
            mixture = mixture / mixture.sum()
            label = rng.choice(len(left), p=mixture)
            left[label] -= 1
            counts[client, label] += 1
    return counts


def test_later_clients_match_drawing_one_by_one():
    labels = np.repeat([0, 1, 2], [6, 9, 15])
    rng = np.random.default_rng(0)
    trials = 1500
    expected = np.stack([_one_by_one(labels, 3, 3.0, rng) for _ in range(trials)])
    found = np.stack(
        [
            partition_lib.class_counts(
                partition_lib.partition(labels, 3, 3.0, seed=seed), labels, 3
            )
            for seed in range(trials)
        ]
    )
    for moment in (1, 2):
        a, b = expected**moment, found.astype(float) ** moment
        error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / trials)
        assert (np.abs(a.mean(axis=0) - b.mean(axis=0)) < 4.5 * error).all()


def test_class_scheme_shares_are_dirichlet():
    # E[sum_k share_k^2] of a symmetric Dirichlet over K clients is (alpha + 1) / (K alpha + 1).
    labels = np.zeros(5000, int)
    shares = [
        np.square(
            partition_lib.client_sizes(
                partition_lib.partition(labels, 8, 0.5, scheme="class", seed=seed)
            )
            / 5000
        ).sum()
        for seed in range(500)
    ]
    assert np.mean(shares) == pytest.approx(1.5 / 5.0, abs=4 * np.std(shares) / np.sqrt(500))


def test_class_scheme_may_leave_clients_empty():
    parts = partition_lib.partition(_labels(n=300, classes=2), 50, 0.01, scheme="class")
    sizes = [len(part) for part in parts]
    assert len(sizes) == 50 and 0 in sizes and sum(sizes) == 300


def test_iid_client_scheme_mixes_classes_evenly():
    labels = np.repeat(np.arange(10), 1000)
    parts = partition_lib.partition(labels, 10, float("inf"))
    counts = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    # Hypergeometric: mean 100, standard deviation 9.
    assert np.abs(counts - 100).max() < 45
    assert counts.std() == pytest.approx(9, rel=0.3)


def test_class_numbers_that_do_not_occur():
    labels = np.repeat([2, 5], 50)
    for scheme in partition_lib.SCHEMES:
        parts = partition_lib.partition(labels, 4, 0.1, scheme=scheme)
        assert sum(map(len, parts)) == 100


def test_eight_hundred_thousand_images_and_a_thousand_clients():
    labels = _labels(n=800_000, classes=62)
    for scheme in partition_lib.SCHEMES:
        parts = partition_lib.partition(labels, 1000, 0.01, scheme=scheme)
        assert len(np.unique(np.concatenate(parts))) == 800_000


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_clients": 0}, "num_clients"),
        ({"num_clients": 2.0}, "num_clients"),
        ({"num_clients": 11}, "num_clients"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": "1"}, "alpha"),
        ({"scheme": None}, "scheme"),
        ({"seed": 2**31}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"alpha": True}, "alpha"),
        ({"seed": -1}, "seed"),
        ({"labels": np.zeros(10)}, "labels"),
        ({"labels": np.full(10, -1)}, "labels"),
        ({"labels": np.zeros((5, 2), int)}, "labels"),
        ({"labels": np.zeros(0, int)}, "labels"),
    ],
)
def test_partition_refuses(change, named):
    arguments = {"labels": np.zeros(10, np.uint8), "num_clients": 2, "alpha": 1.0, **change}
    with pytest.raises(ValueError, match=rf"^{named} must") as error:
        partition_lib.partition(**arguments)
    assert "\n" not in str(error.value)


def test_schemes_have_names():
    with pytest.raises(ValueError, match=r"scheme 'clients' is unknown \(did you mean client\?\)"):
        partition_lib.partition(np.zeros(10, int), 2, 1.0, scheme="clients")


def test_numpy_numbers_are_numbers():
    labels = _labels(n=600)
    expected = partition_lib.partition(labels, 6, 2, seed=3)
    for alpha in (2.0, np.int8(2), np.float32(2)):
        found = partition_lib.partition(labels, np.uint8(6), alpha, seed=np.int64(3))
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    first = partition_lib.split_labeled(expected[0], np.float64(0.25), np.int32(1), np.int32(2))
    again = partition_lib.split_labeled(expected[0], 0.25, 1, 2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("n", "fraction", "labeled"),
    [
        (100, 0.2, 20),
        (50, 0.29, 15),  # 14.5, which floating point puts below the half
        (10, 0.05, 1),  # 0.5
        (10, 0.04, 1),  # 0.4, but never none
        (10, 1.0, 10),
        (1, 0.01, 1),
        (0, 0.5, 0),
        (70, 0.05, 4),  # 3.5
    ],
)
def test_split_labeled_counts(n, fraction, labeled):
    rows = np.arange(1000, 1000 + n)
    first, second = partition_lib.split_labeled(rows, fraction, 0, 0)
    assert len(first) == labeled
    assert sorted([*first, *second]) == list(rows)


def test_split_labeled_is_uniform_and_keyed_by_seed_and_client():
    rows = np.arange(10)
    draws = [partition_lib.split_labeled(rows, 0.3, 5, client)[0] for client in range(2000)]
    frequency = np.bincount(np.concatenate(draws), minlength=10) / 2000
    np.testing.assert_allclose(frequency, 0.3, atol=4 * np.sqrt(0.3 * 0.7 / 2000))
    again = partition_lib.split_labeled(rows, 0.3, 5, 7)[0]
    assert np.array_equal(again, draws[7])
    seeds = {tuple(partition_lib.split_labeled(rows, 0.3, seed, 7)[0]) for seed in range(20)}
    assert len(seeds) > 5


@pytest.mark.parametrize("fraction", [0, 0.0, -0.1, 1.01, float("nan"), "0.5", True])
def test_split_labeled_refuses_fraction(fraction):
    with pytest.raises(ValueError, match="labeled_fraction"):
        partition_lib.split_labeled(np.arange(4), fraction)


def test_describe():
    labels = np.array([0, 0, 1, 1, 2, 2])
    parts = [np.array([0, 1, 2]), np.array([4]), np.array([], int)]
    assert partition_lib.describe(parts, labels) == (
        "3 clients, 4 of 6 images used; images per client: least 0, median 1, most 3, "
        "without any 1; classes per client: least 0, median 1, most 2"
    )
    assert partition_lib.client_sizes(parts).tolist() == [3, 1, 0]
    assert partition_lib.class_counts(parts, labels, np.int64(4)).shape == (3, 4)
    with pytest.raises(ValueError, match="^num_classes must"):
        partition_lib.class_counts(parts, labels, 2)
    assert partition_lib.class_counts(parts, labels).tolist() == [[2, 1, 0], [0, 0, 1], [0, 0, 0]]
