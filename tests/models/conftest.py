"""Fixtures shared by the tests of models."""

import pytest
import tensorflow as tf


@pytest.fixture(autouse=True)
def seeded():
    """A model's initial weights are the same in every run of the tests."""
    tf.keras.utils.set_random_seed(0)


@pytest.fixture
def policy(request):
    """Sets the Keras policy that the test is parametrised with, for this test only."""
    before = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    tf.keras.mixed_precision.set_global_policy(before)
