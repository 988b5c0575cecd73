"""Fixtures shared by all tests."""

import pathlib
import sys

import pytest

TESTS = pathlib.Path(__file__).parent

# The files that take longest, the longest first. pytest-xdist hands out files in the order of their
# tests (--no-loadscope-reorder), and one that begins last keeps a single process busy at the end.
LONGEST = (
    "algorithms/test_contract.py",
    "algorithms/test_fedlabel.py",
    "training/test_small_methods.py",
    "test_deployment_table.py",
    "training/test_loop.py",
    "algorithms/test_mixed_precision_rounds.py",
    "algorithms/test_fedlabel_edge_cases.py",
    "algorithms/test_fedtrinet.py",
    "algorithms/test_fedmatch.py",
    "algorithms/test_fixmatch.py",
    "algorithms/test_uda.py",
    "training/test_exporting.py",
    "runtime/test_device_placement.py",
    "training/test_programs.py",
    "test_docs_pages.py",
    "datasets/test_sources_tfds.py",
    "training/test_own_experiment.py",
    "training/test_schedules_and_stopping.py",
    "runtime/test_device.py",
    "runtime/test_determinism.py",
    "test_notebook.py",
    "algorithms/test_secure.py",
    "runtime/test_workers.py",
    "docs/test_own_data_page.py",
    "runtime/test_cohorts.py",
    "runtime/test_device_concurrency.py",
    "models/test_gradients.py",
)


def pytest_collection_modifyitems(items):
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in ranks), "LONGEST names a file that is not there"
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


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
