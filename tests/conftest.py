"""Fixtures shared by all tests."""

import gc
import os
import pathlib
import sys

import pytest

# The test processes share the cores, and a run compares to the bit with one in a process of its own
# only if both divide an operation among as many threads. Before TensorFlow's first operation.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
# Where Python is told not to write bytecode, as in many containers, each process of the tests would
# compile TensorFlow's source again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TESTS = pathlib.Path(__file__).parent

# The files that take longest, the longest first. pytest-xdist hands out files in the order of their
# tests (--no-loadscope-reorder), and one that begins last keeps a single process busy at the end.
LONGEST = (
    "algorithms/test_contract.py",
    "algorithms/test_mixed_precision_rounds.py",
    "training/test_small_methods.py",
    "training/test_loop.py",
    "algorithms/test_secure.py",
    "test_cost.py",
    "algorithms/test_fedtrinet.py",
    "grids/test_pool.py",
    "runtime/test_device.py",
    "training/test_schedules_and_stopping.py",
    "training/test_own_experiment.py",
    "training/test_exporting.py",
    "models/test_functional.py",
    "test_deployment_table.py",
    "training/test_programs.py",
    "algorithms/test_fedlabel_edge_cases.py",
    "runtime/test_determinism.py",
    "runtime/test_device_placement.py",
    "test_docs_pages.py",
    "models/test_resnet.py",
    "algorithms/test_rscfed.py",
    "test_notebook.py",
    "datasets/test_sources_tfds.py",
    "training/test_label_places.py",
    "algorithms/test_fedlabel.py",
    "training/test_fedmatch_runs.py",
    "augmentation/test_draws.py",
    "test_check_gpu.py",
    "algorithms/test_semifl.py",
    "training/test_report.py",
    "training/test_differential_privacy.py",
    "models/test_gradients.py",
    "runtime/test_cohorts.py",
    "runtime/test_device_concurrency.py",
)


def pytest_collection_modifyitems(items):
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in ranks), "LONGEST names a file that is not there"
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection_finish():
    """Not where pytest-xdist only hands out tests: importing TensorFlow takes long."""
    # Its exit hook also ends the context that TFF makes on import.
    import tff_fedlabel.runtime  # noqa: F401

    # Graphs are hundreds of thousands of objects, most of which stay: by default Python looks
    # through them for garbage so often that it takes a tenth of the time.
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def local_runtime():
    """One TFF worker for all tests that run computations."""
    from tff_fedlabel import runtime

    with runtime.use("local") as handle:
        yield handle


@pytest.fixture(scope="session")
def plans():
    """What `compile_once` compiled: (computation, plan), by the computation's id."""
    return {}


@pytest.fixture(scope="module")
def compile_once(plans):
    """What one device runtime has compiled serves all of them."""
    from tff_fedlabel.runtime import device

    compile_computation = device.compile_computation

    def compiled(computation, simulate_secure_aggregation=False):
        key = id(computation), simulate_secure_aggregation
        if key not in plans:
            # Holding the computation, so that no other one gets its id.
            plans[key] = computation, compile_computation(computation, simulate_secure_aggregation)
        return plans[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "compile_computation", compiled)
        yield


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
