"""The notebooks in colab/: as they are committed, and run here and in an environment like Colab's.

To run them takes minutes, and to make that environment a network: `-m colab` asks for both.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata

import pytest
from test_notebook import Kernel, shown_errors

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What stands in the cell tagged "parameters", and what it is set to here.
NOTEBOOKS = {
    "fedlabel_quickstart": "ROUNDS, WARM_UP, SEEDS = 2, 2, [0]",
    "fedlabel_paper": "ROUNDS = 2",
}
MOST_BYTES, MOST_PICTURE_BYTES = 1_500_000, 150_000


def read(name):
    return json.loads((ROOT / "colab" / f"{name}.ipynb").read_text())


def code_cells(name):
    return [cell for cell in read(name)["cells"] if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


def run_notebook(kernel, name):
    """Runs all cells, the parameters set to small values; returns the outputs of each."""
    outputs = []
    for cell in code_cells(name):
        outputs.append(kernel.run(source(cell)))
        if "parameters" in cell["metadata"].get("tags", ()):
            kernel.run(NOTEBOOKS[name])
        assert not shown_errors(outputs[-1]), source(cell)
        noise = [content for kind, content in outputs[-1] if content.get("name") == "stderr"]
        assert not noise, (source(cell), noise)
    return outputs


def text(outputs):
    return "".join(content["text"] for kind, content in outputs if kind == "stream")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_is_committed_as_it_reads_best(name):
    """With outputs, which are small, free of widgets and say nothing about the machine."""
    import nbformat

    path = ROOT / "colab" / f"{name}.ipynb"
    nbformat.validate(nbformat.read(path, 4))
    assert path.stat().st_size < MOST_BYTES
    assert not re.search(r"/root/|/home/|/work/|/tmp/|\w@\w", path.read_text())
    assert not re.search("widget|iopub", path.read_text())
    pictures = 0
    for number, cell in enumerate(code_cells(name), start=1):
        assert cell["execution_count"] == number, "run all cells in order, from a new kernel"
        assert "execution" not in cell["metadata"]
        for output in cell["outputs"]:
            assert output["output_type"] != "error" and output.get("name") != "stderr"
            picture = output.get("data", {}).get("image/png", "")
            pictures += bool(picture)
            assert len(picture) * 3 / 4 < MOST_PICTURE_BYTES
    assert pictures


def test_install_cells_are_the_same():
    first, second = (source(code_cells(name)[0]) for name in NOTEBOOKS)
    assert first == second
    assert first.count("\nSOURCE = ") == 2


def test_a_wheel_that_is_not_there_is_told_in_one_line(monkeypatch, tmp_path):
    version = metadata.version

    def without_ours(package):
        if package == "tff-fedlabel":
            raise metadata.PackageNotFoundError
        return version(package)

    monkeypatch.setattr(metadata, "version", without_ours)
    monkeypatch.setenv("TFF_FEDLABEL_SOURCE", "some.whl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        exec(source(code_cells("fedlabel_paper")[0]), {})
    (line,) = caught.value._render_traceback_()
    assert line.startswith(f"Upload some.whl to {tmp_path} (in Colab: ")


def test_quickstart_runs_until_it_trains(monkeypatch):
    """Without `-m colab`: the cells that load the data and draw it, plain and augmented."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = {}
    for cell in code_cells("fedlabel_quickstart"):
        if "process.next" in source(cell):
            break
        exec(source(cell), names)
    names["plt"].close("all")
    assert names["views"]["weak"].shape == names["images"].shape == (8, 8, 8, 1)


@pytest.mark.colab
def test_both_run_here(tmp_path):
    """In one kernel, for its TensorFlow takes longest."""
    kernel = Kernel(sys.executable, tmp_path)
    try:
        check_quickstart(run_notebook(kernel, "fedlabel_quickstart"))
        kernel.run("%reset -f")
        check_paper(run_notebook(kernel, "fedlabel_paper"))
        again = run_notebook(kernel, "fedlabel_paper")  # As after a disconnect.
        check_paper(again)
    finally:
        kernel.stop()
    checkpoints = tmp_path / "runs" / "digits-fedlabel-0.2-seed0" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"round_2", "best"}


def check_quickstart(outputs):
    shown = "".join(map(text, outputs))
    assert re.search(r"^GPU: .*, tff-fedlabel \d", shown)
    # One round by hand is one round of the package.
    assert float(re.search(r"largest difference of a weight: (\S+)", shown)[1]) < 1e-6
    pictures = [c for cell in outputs for _, c in cell if "image/png" in c.get("data", {})]
    assert len(pictures) >= 6


def check_paper(outputs):
    assert re.search(
        r"^\| digits \| fedlabel \| cnn \| 20% \| 1 \| 2 \| 0 \| ", text(outputs[-1]), re.M
    )


@pytest.fixture(scope="module")
def colab(tmp_path_factory):
    """The Python of a new environment with the packages of Colab's."""
    uv = shutil.which("uv") or pytest.skip("there is no uv")
    folder = tmp_path_factory.mktemp("colab")
    made = subprocess.run(
        [uv, "venv", "--python", "3.12", "--seed", folder / "environment"],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"there is no Python 3.12: {made.stderr.strip()}")
    python = folder / "environment" / "bin" / "python"
    packages = ["-r", ROOT / "requirements" / "colab.txt"]
    subprocess.run([uv, "pip", "install", "-q", "--python", python, *packages], check=True)
    subprocess.run([uv, "build", "-q", "--wheel", "--out-dir", folder, ROOT], check=True)
    return str(python), next(folder.glob("*.whl"))


def versions(python):
    listed = subprocess.check_output([python, "-m", "pip", "list", "--format", "json"], text=True)
    return {p["name"].lower().replace("_", "-"): p["version"] for p in json.loads(listed)}


@pytest.mark.colab
def test_install_cell_changes_nothing_that_is_there(colab, tmp_path):
    """And a new kernel is not needed: both notebooks go on in the one that installed."""
    python, wheel = colab
    install = source(code_cells("fedlabel_quickstart")[0])
    before = versions(python)
    assert "tff-fedlabel" not in before and "tensorflow-federated" not in before
    kernel = Kernel(python, tmp_path, PYTHONPATH="")
    try:
        assert shown_errors(kernel.run(install)) == [
            f"Upload {wheel.name} to {tmp_path} (in Colab: the folder icon on the left)."
        ]
        shutil.copy(wheel, tmp_path)
        started = time.perf_counter()
        outputs = kernel.run(install)
        print(f"the install cell took {time.perf_counter() - started:.0f} s")
        assert not shown_errors(outputs)
        after = versions(python)
        assert {name: after.get(name) for name in before} == before
        assert after["tff-fedlabel"] and after["tensorflow-federated"] == "0.87.0"
        check_quickstart(run_notebook(kernel, "fedlabel_quickstart"))
        kernel.run("%reset -f")
        check_paper(run_notebook(kernel, "fedlabel_paper"))
    finally:
        kernel.stop()


@pytest.mark.colab
def test_kernel_of_colab_behaves(colab):
    """tests/test_notebook.py in that kernel, after the installation above."""
    environment = {**os.environ, "TFF_FEDLABEL_KERNEL": colab[0], "PYTHONPATH": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", ROOT / "tests" / "test_notebook.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
