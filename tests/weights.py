"""How tests compare weights."""

import numpy as np


def assert_weights_close(actual, expected, atol=2e-5):
    """Arrays in the same order, each as near as float32 arithmetic brings them."""
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), e, atol=atol, rtol=0)


def assert_weights_equal(actual, expected):
    """To the bit."""
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))
