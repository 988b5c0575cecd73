"""Fixtures of the data tests."""

import os
import pathlib

import pytest


@pytest.fixture(scope="session")
def real_data_dir():
    """Where CIFAR-10 and Fashion-MNIST lie in tensorflow-datasets' prepared form."""
    named = os.environ.get("TFF_FEDLABEL_DATA_DIR")
    beside = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data" / "tfds"
    path = pathlib.Path(named) if named else beside
    if not (path / "cifar10").is_dir() or not (path / "fashion_mnist").is_dir():
        pytest.skip(f"no real data at {path}; name its folder in TFF_FEDLABEL_DATA_DIR")
    return str(path)


@pytest.fixture
def no_network(monkeypatch):
    """Fails the test when Python opens a connection."""
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError(f"the network was touched: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
