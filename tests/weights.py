"""How tests compare weights."""

import numpy as np

# How near float32 arithmetic comes to float64 in a few rounds.
TOLERANCE = 2e-5


def assert_weights_close(actual, expected, atol=TOLERANCE):
    """Arrays in the same order, none of them further off than `atol` anywhere."""
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), e, atol=atol, rtol=0)


def assert_weights_equal(actual, expected):
    """To the bit."""
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))
