"""The runtimes of whole rounds: `device`, the default; one module shows `local` to agree."""

import pytest


@pytest.fixture(scope="session")
def device_runtime():
    from tff_fedlabel import runtime

    with runtime.use("device") as handle:
        yield handle
