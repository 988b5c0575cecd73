"""What tests of the runtimes share."""

import pytest


@pytest.fixture(scope="module")
def local():
    """The worker, as the second path."""
    from tff_fedlabel import runtime

    with runtime.local.start() as backend:
        yield backend


@pytest.fixture(scope="module")
def here():
    from tff_fedlabel import runtime

    with runtime.device.start() as backend:
        yield backend


@pytest.fixture(scope="module")
def clients():
    from linear_model import random_client, to_tff

    return [to_tff(random_client(seed)) for seed in range(5)]
