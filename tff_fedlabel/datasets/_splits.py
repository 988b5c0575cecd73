"""Which images go to training, validation and test."""

import numpy as np

# The paper's appendix: 80% training, 5% validation, 15% test.
VALIDATION_PERCENT = 5
TEST_PERCENT = 15


def split_rows(
    name: str, sizes: dict[str, int], split: str, seed: int
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Row numbers (the parts of the data concatenated) in final order, and the three sizes.

    Args:
      name: the data set, for the message.
      sizes: images by part, in order: "train" first.
      split: "pooled" or "official", see `sources.load`.
      seed: decides which images go where.

    Raises:
      ValueError: "official" without a test part.
    """
    rng = np.random.default_rng(np.random.SeedSequence((seed, 0x5EED)))
    total = sum(sizes.values())
    if split == "pooled":
        num_validation = total * VALIDATION_PERCENT // 100
        num_test = total * TEST_PERCENT // 100
        return rng.permutation(total), (
            total - num_validation - num_test,
            num_validation,
            num_test,
        )
    if "test" not in sizes:
        raise ValueError(f"split must be 'pooled' for {name}, which has no published test set.")
    rows, start = {}, 0
    for key, size in sizes.items():
        rows[key] = np.arange(start, start + size)
        start += size
    if "validation" not in rows:
        rows["train"], rows["validation"] = _take(rng, rows["train"], VALIDATION_PERCENT)
    ordered = [rows[key] for key in ("train", "validation", "test")]
    return np.concatenate(ordered), tuple(map(len, ordered))


def take_test(rows: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(the others, 15% of `rows`), for data that brings a validation part and no test part."""
    rng = np.random.default_rng(np.random.SeedSequence((seed, 0x5EED)))
    return _take(rng, rows, TEST_PERCENT)


def _take(rng, rows: np.ndarray, percent: int) -> tuple[np.ndarray, np.ndarray]:
    """(the others, `percent` % of the rows chosen at random), each in the order of `rows`."""
    chosen = np.zeros(len(rows), bool)
    chosen[rng.choice(len(rows), len(rows) * percent // 100, replace=False)] = True
    return rows[~chosen], rows[chosen]
