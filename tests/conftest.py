"""Fixtures shared by all tests."""

import sys

import pytest


def pytest_collection_finish():
    """Not where pytest-xdist only hands out tests: importing TensorFlow takes long."""
    # Its exit hook also ends the context that TFF makes on import.
    import tff_fedlabel.runtime  # noqa: F401


@pytest.fixture(scope="session")
def local_runtime():
    """One TFF worker for all tests that run computations."""
    from tff_fedlabel import runtime

    with runtime.use("local") as handle:
        yield handle


@pytest.fixture
def main(monkeypatch):
    """The command line without a process of its own: `main("--rounds", "3")` -> exit code."""
    from absl import flags

    from tff_fedlabel import cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["run_tff.py", *arguments])
        before = set(flags.FLAGS)
        try:
            return cli.main(sys.argv)
        finally:
            for name in set(flags.FLAGS) - before:
                delattr(flags.FLAGS, name)

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The directory of a small finished run; do not write to it."""
    import trained_runs

    output_dir = tmp_path_factory.mktemp("trained") / "run"
    trained_runs.train(output_dir)
    return output_dir
