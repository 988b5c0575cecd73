"""A pool that takes the place of the real one."""

import pytest
from grids import command, pool
from hand_made_runs import FakePool


@pytest.fixture
def fake_pool(monkeypatch):
    """`FakePool`, whose runs reach .5 unless its `accuracies` says otherwise."""
    monkeypatch.setattr(pool, "_POLL", 0.0)

    class Pool(FakePool):
        accuracies = staticmethod(lambda cell: [0.5] * cell.config.rounds)

    monkeypatch.setattr(command, "Pool", Pool)
    return Pool
