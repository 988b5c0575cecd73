"""Divides images across clients, and each client's images into labelled and unlabelled.

Everything here works on labels and row numbers; no image is touched. The same arguments give the
same result.
"""

import decimal
import math

import numpy as np

from tff_fedlabel._validation import (
    WrongTypeError,
    check_int,
    check_name,
    check_number,
    check_number_or_infinity,
    check_seed,
)

SCHEMES = ("client", "class", "client_symmetric")


def partition(
    labels: np.ndarray,
    num_clients: int,
    alpha: float,
    *,
    scheme: str = "client",
    seed: int = 0,
) -> list[np.ndarray]:
    """Divides rows across clients with label skew.

    "client" (Hsu, Qi and Brown 2019, "Measuring the effects of non-identical data distribution for
    federated visual classification", cited in the paper's section on data partitioning): client k
    draws a class mixture q_k ~ Dir(alpha N p), N the number of classes and p their frequencies in
    `labels`, and takes its images one by one from it without replacement; a class that is used up
    drops out and the mixture is renormalised over the others. The frequencies make
    alpha -> infinity IID for unbalanced classes too. (Hsu et al. write Dir(alpha p): their alpha is
    N times this one.) Every client has floor(n / num_clients) images; the remaining images, fewer
    than `num_clients`, are unused.

    With balanced classes that is the symmetric Dir(alpha). With others it is not: a class of half
    the mean frequency has the concentration alpha / 2, so that rare classes (the letters of EMNIST,
    which has more of each digit) are more skewed than alpha says, and frequent ones less.

    "client_symmetric": the same with q_k ~ Dir(alpha): each class has concentration alpha whatever
    its frequency. On average the mixtures are then uniform over the classes, so with unbalanced
    classes the first clients use up the rare ones, the last get what is left, and
    alpha -> infinity is not IID.

    "class": the images of each class are divided by client shares drawn from a symmetric
    Dir(alpha). All images are used; sizes vary, and a client may have few images or none.

    Args:
      labels: integer [n], each >= 0.
      num_clients: number of clients, >= 1.
      alpha: concentration, > 0; small is skewed, `float("inf")` has no skew (but see
        "client_symmetric"). In "client" it is the mean concentration of a class, in
        "client_symmetric" that of each class, in "class" that of each client.
      scheme: one of `SCHEMES`.
      seed: in [0, 2**31).

    Returns:
      One ascending int64 array of row numbers for each client. No row occurs twice.

    Raises:
      ValueError: naming the argument that is out of range. `WrongTypeError`, which is a ValueError
        too, if a type is wrong.
    """
    labels = _check_labels(labels)
    num_clients = check_int("num_clients", num_clients)
    seed = check_seed(seed)
    alpha = _check_alpha(alpha)
    check_name("scheme", scheme, SCHEMES)
    rng = np.random.default_rng(np.random.SeedSequence((seed, 0xD1)))
    if scheme == "class":
        return _by_class(labels, num_clients, alpha, rng)
    if len(labels) < num_clients:
        raise ValueError(
            f"num_clients must be at most the number of images ({len(labels)}), got {num_clients}."
        )
    size = len(labels) // num_clients
    if math.isinf(alpha) and scheme == "client":
        rows = rng.permutation(len(labels))[: size * num_clients].reshape(num_clients, size)
        return list(np.sort(rows, axis=1))
    return _by_client(labels, num_clients, size, alpha, scheme == "client", rng)


def split_labeled(
    indices: np.ndarray, labeled_fraction: float, seed: int = 0, client: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses which of one client's images are labelled, uniformly at random.

    Args:
      indices: integer [n], the client's row numbers.
      labeled_fraction: in (0, 1].
      seed: in [0, 2**31).
      client: the client's number, >= 0; each client has its own draw.

    Returns:
      (labelled, unlabelled) row numbers, each in the order of `indices`. round(fraction * n),
      halves up, are labelled, and at least one where n > 0.

    Raises:
      ValueError: naming the argument that is out of range. `WrongTypeError`, which is a ValueError
        too, if a type is wrong.
    """
    indices = np.asarray(indices)
    if indices.ndim != 1:
        raise WrongTypeError(f"indices must have shape [n], got {list(indices.shape)}.")
    labeled_fraction = check_labeled_fraction(labeled_fraction)
    seed = check_seed(seed)
    client = check_int("client", client, 0)
    count = _share(labeled_fraction, len(indices), len(indices))
    rng = np.random.default_rng(np.random.SeedSequence((seed, 0x1AB, client)))
    chosen = np.zeros(len(indices), bool)
    chosen[rng.permutation(len(indices))[:count]] = True
    return indices[chosen], indices[~chosen]


def choose_labeled_clients(
    parts: list[np.ndarray], labeled_fraction: float, seed: int = 0
) -> np.ndarray:
    """Chooses the clients that keep all their labels, where the others keep none.

    Args:
      parts: row numbers by client; a client without images is never chosen.
      labeled_fraction: in (0, 1], of the clients.
      seed: in [0, 2**31).

    Returns:
      bool [clients]. round(fraction * clients), halves up, are chosen uniformly at random, one at
      least and at most all that have images.

    Raises:
      ValueError: naming the argument that is out of range.
    """
    labeled_fraction = check_labeled_fraction(labeled_fraction)
    rng = np.random.default_rng(np.random.SeedSequence((check_seed(seed), 0x1ABC)))
    able = np.flatnonzero(client_sizes(parts))
    chosen = np.zeros(len(parts), bool)
    chosen[rng.permutation(able)[: _share(labeled_fraction, len(parts), len(able))]] = True
    return chosen


def client_sizes(parts: list[np.ndarray]) -> np.ndarray:
    """Images by client: int64 [clients]."""
    return np.array([len(part) for part in parts], np.int64)


def class_counts(
    parts: list[np.ndarray], labels: np.ndarray, num_classes: int | None = None
) -> np.ndarray:
    """Images by client and class: int64 [clients, num_classes].

    `num_classes` is by default one more than the largest label; ValueError if it is less.
    """
    labels = _check_labels(labels)
    least = int(labels.max()) + 1
    num_classes = least if num_classes is None else check_int("num_classes", num_classes, least)
    counts = [np.bincount(labels[part], minlength=num_classes) for part in parts]
    return np.stack(counts) if counts else np.zeros((0, num_classes), np.int64)


def describe(parts: list[np.ndarray], labels: np.ndarray) -> str:
    """One line on a partition: images used, smallest, median and largest client, empty clients."""
    sizes = client_sizes(parts)
    classes = np.count_nonzero(class_counts(parts, labels), axis=1)
    return (
        f"{len(parts)} clients, {sizes.sum()} of {len(labels)} images used; images per client: "
        f"least {sizes.min()}, median {np.median(sizes):g}, most {sizes.max()}, "
        f"without any {np.count_nonzero(sizes == 0)}; classes per client: "
        f"least {classes.min()}, median {np.median(classes):g}, most {classes.max()}"
    )


def check_labeled_fraction(labeled_fraction: float) -> float:
    """Returns a number in (0, 1]; ValueError if it is not one."""
    return check_number("labeled_fraction", labeled_fraction, 0.0, 1.0, open_low=True)


def _share(fraction: float, number: int, most: int) -> int:
    """round(fraction * number), halves up, at least 1 and at most `most`."""
    # Decimal, since 0.29 * 50 is 14.499999999999998 in floating point.
    exact = decimal.Decimal(repr(float(fraction))) * number
    return min(max(int(exact.to_integral_value(rounding=decimal.ROUND_HALF_UP)), 1), most)


def _by_client(labels, num_clients, size, alpha, by_frequency, rng) -> list[np.ndarray]:
    available = np.bincount(labels)
    if by_frequency:
        concentration = alpha * np.count_nonzero(available) * available / len(labels)
    else:
        concentration = np.where(available > 0, alpha, 0.0)
    log_mixtures = _log_dirichlet(rng, concentration, num_clients)
    counts = np.zeros((num_clients, len(available)), np.int64)
    for client in range(num_clients):
        missing = size
        while missing:
            # Drawing the missing images at once and rejecting those of a class that is used up
            # gives the same counts as drawing one by one and renormalising: the rejected draws
            # are repeated from the classes that are left.
            mixture = _normalise(np.where(available > 0, log_mixtures[client], -np.inf))
            taken = np.minimum(rng.multinomial(missing, mixture), available)
            counts[client] += taken
            available = available - taken
            missing -= taken.sum()
    return _hand_out(labels, counts, rng)


def _by_class(labels, num_clients, alpha, rng) -> list[np.ndarray]:
    available = np.bincount(labels)
    counts = np.zeros((num_clients, len(available)), np.int64)
    for label, number in enumerate(available):
        if math.isinf(alpha):
            shares = np.full(num_clients, 1.0 / num_clients)
        else:
            shares = _normalise(_log_dirichlet(rng, np.full(num_clients, alpha), 1)[0])
        # In random order; otherwise rounding would favour the same clients in every class.
        clients = rng.permutation(num_clients)
        edges = np.floor(np.cumsum(shares[clients]) * number + 1e-9).astype(np.int64)
        edges[-1] = number
        counts[clients, label] = np.diff(edges, prepend=0)
    return _hand_out(labels, counts, rng)


def _hand_out(labels, counts, rng) -> list[np.ndarray]:
    """Draws random rows for counts [clients, classes] of images."""
    num_clients = len(counts)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(labels))])
    rows, owners = [], []
    for label in range(counts.shape[1]):
        owner = np.repeat(np.arange(num_clients), counts[:, label])
        rows.append(by_class[starts[label] : starts[label] + len(owner)])
        owners.append(owner)
    rows, owners = np.concatenate(rows), np.concatenate(owners)
    rows = rows[np.lexsort((rows, owners))]
    return np.split(rows, np.cumsum(counts.sum(axis=1))[:-1])


def _log_dirichlet(rng, concentration, number) -> np.ndarray:
    """Logs of `number` Dirichlet draws up to a constant each, [number, len(concentration)].

    Gamma(a) = Gamma(a + 1) U^(1/a), taken in logs: for small a the draws themselves underflow to
    zero, all at once in the worst case, and their order would be lost.
    """
    shape = (number, len(concentration))
    if np.isinf(concentration).any():  # All classes with images have the same share.
        return np.where(concentration > 0, np.zeros(shape), -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        # 1 - U is in (0, 1]. A class without images has concentration 0 and log share -inf.
        scaled = np.log1p(-rng.random(shape)) / concentration
        logs = np.log(rng.gamma(concentration + 1.0, size=shape)) + scaled
    return np.where(concentration > 0, logs, -np.inf)


def _normalise(logs) -> np.ndarray:
    shares = np.exp(logs - logs.max())
    return shares / shares.sum()


def _check_labels(labels) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise WrongTypeError(
            f"labels must be integers [n], got {labels.dtype} {list(labels.shape)}"
        )
    if len(labels) and labels.min() < 0:
        raise ValueError(f"labels must be 0 or more, got {labels.min()}.")
    if not len(labels):
        raise ValueError("labels must not be empty.")
    return labels.astype(np.int64)


def _check_alpha(alpha) -> float:
    alpha = check_number_or_infinity("alpha", alpha)
    if alpha == 0:
        raise ValueError(f"alpha must be a number above 0 or infinity, got {alpha!r}.")
    return float(alpha)
