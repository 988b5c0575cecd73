"""The seeds of steps: a hash in Python's integers, and that they differ."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fedlabel.augmentation import step_seed


def _python_step_seed(*values):
    """The hash in Python's integers, which neither overflow nor have a sign bit."""

    def mix(word):
        word = (word + 0x9E3779B9) % 2**32
        for multiplier in (0x5BD1E995, 0x2C9277B5):
            word = (word ^ word >> 16) * multiplier % 2**32
        return word ^ word >> 15

    words = [0x5EED01, 0x5EED02]
    for value in values:
        low, high = value % 2**32, value % 2**64 // 2**32
        words = [mix(mix(word ^ low) ^ high) for word in words]
    return np.array(words, np.uint32).view(np.int32)


SEEDS = [(0, 0, 0), (2**31 - 1, 1, 2), (-5, 7, 2**31 - 1), (12, -1, 3), (2**40 + 1, 2**33, 9)]


@pytest.mark.parametrize("values", SEEDS)
def test_step_seed_is_the_hash_in_a_graph_and_eagerly(values):
    expected = _python_step_seed(*values)
    found = step_seed(*values)
    assert found.dtype == tf.int32 and found.shape == (2,)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(step_seed(*np.int64(values)), expected)
    np.testing.assert_array_equal(step_seed(*(tf.constant(v, tf.int64) for v in values)), expected)
    for dtype in (tf.int32, tf.int64):
        if dtype.max < max(values):
            continue
        in_graph = tf.function(
            lambda round_num, step: step_seed(values[0], round_num, step),
            input_signature=[tf.TensorSpec([], dtype)] * 2,
        )
        np.testing.assert_array_equal(in_graph(*values[1:]), expected)
        assert not in_graph.get_concrete_function().graph.captures


def test_step_seeds_differ_and_their_bits_are_even():
    grid = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"), -1).reshape(-1, 3)
    map_all = tf.function(
        lambda rows: tf.map_fn(lambda row: step_seed(*tf.unstack(row)), rows, tf.int32)
    )
    seeds = map_all(tf.constant(grid)).numpy()
    for word in range(2):
        # Of 4096 draws out of 2**32, two are equal with a chance of 0.2%.
        assert len(np.unique(seeds[:, word])) == len(grid)
        bits = seeds[:, word].view(np.uint32)[:, np.newaxis] >> np.arange(32, dtype=np.uint32) & 1
        assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / len(grid) ** 0.5
    assert abs(np.corrcoef(seeds.T.astype(float))[0, 1]) < 5 / len(grid) ** 0.5


def test_step_seed_refuses_what_is_no_whole_number():
    for position, field in enumerate(("seed", "round_num", "step")):
        for wrong in (0.5, tf.constant([1, 2]), True):
            values = [0, 0, 0]
            values[position] = wrong
            with pytest.raises(ValueError, match=f"^{field} must") as error:
                step_seed(*values)
            assert len(str(error.value).splitlines()) == 1
