"""Fixtures shared by all tests."""

import pytest

# Its exit hook also ends the context that TFF makes on import.
import tff_fedlabel.runtime  # noqa: F401


@pytest.fixture(scope="session")
def local_runtime():
    """One TFF worker for all tests that run computations."""
    from tff_fedlabel import runtime

    with runtime.use("local") as handle:
        yield handle
