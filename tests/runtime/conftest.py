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


@pytest.fixture(scope="module")
def addresses():
    """Three workers, which no test harms."""
    from worker_processes import address, one_worker

    with one_worker() as first, one_worker() as second, one_worker() as third:
        yield [address(worker.port) for worker in (first, second, third)]
