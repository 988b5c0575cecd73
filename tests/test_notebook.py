"""Training in a notebook's kernel: what a cell shows, and what interrupting it does.

TFF_FEDLABEL_KERNEL is the Python whose kernel is tested; by default the one that runs the tests.
"""

import json
import os
import re
import sys

import pytest

CHOICES = dict(
    algorithm="fedavg",
    rounds=12,
    width=4,
    num_clients=6,
    clients_per_round=3,
    tau=2,
    tau_unlabeled=2,
    batch_size=8,
    eval_every=6,
    client_accuracy=False,
)


class Kernel:
    """A kernel, and what its cells put out: (type, content) pairs of Jupyter's messages.

    Args:
      python: The Python that runs it.
      folder: Where its cells run.
      environment: More variables.
    """

    def __init__(self, python, folder, **environment):
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import KernelManager

        spec = folder / "kernels" / "tested"
        spec.mkdir(parents=True, exist_ok=True)
        argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "tested"}))
        specs = KernelSpecManager(kernel_dirs=[str(spec.parent)])
        self.manager = KernelManager(kernel_name="tested", kernel_spec_manager=specs)
        # Without what importing the package has set in this process.
        ours = ("TF_CPP_MIN_LOG_LEVEL", "TF_USE_LEGACY_KERAS")
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        self.manager.start_kernel(cwd=str(folder), env={**inherited, **environment})
        self._client = self.manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)

    def run(self, cell, seen=lambda kind, content: None):
        """Runs a cell; calls `seen` with each output as it comes."""
        outputs = []

        def take(message):
            kind = message["header"]["msg_type"]
            if kind not in ("status", "execute_input"):
                outputs.append((kind, message["content"]))
                seen(*outputs[-1])

        self._client.execute_interactive(cell, output_hook=take, timeout=400, allow_stdin=False)
        return outputs

    def stop(self):
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    python = os.environ.get("TFF_FEDLABEL_KERNEL", sys.executable)
    started = Kernel(python, tmp_path_factory.mktemp("notebook"))
    try:
        # In the order of isort, and without a word.
        assert not started.run(
            "import asyncio\nimport pathlib\nimport numpy as np\n"
            "import tensorflow as tf\nimport tensorflow_federated as tff\n"
            "from tff_fedlabel import training\n"
            f"config = training.make_config('digits', **{CHOICES})"
        )
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def run(kernel):
    """The outputs of a cell that trains, in the directory "run"."""
    return kernel.run("asyncio.get_running_loop()\nsummary = training.run(config, 'run')")


def shown_errors(outputs):
    """The lines of the errors in a cell's output, without their colours."""
    errors = [content["traceback"] for kind, content in outputs if kind == "error"]
    text = "\n".join(line for lines in errors for line in lines)
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


def test_a_run_shows_one_bar_and_nothing_else(run):
    kinds = {kind for kind, _ in run}
    assert kinds == {"display_data", "update_display_data"}, run
    places = {content["transient"]["display_id"] for _, content in run}
    assert len(places) == 1
    last = run[-1][1]["data"]
    assert list(last) == ["text/plain"]
    assert re.match(r"100%\|█+\| 12/12 \[.*, accuracy=0\.\d+\]$", last["text/plain"])


@pytest.mark.usefixtures("run")
def test_a_second_run_in_the_same_place_says_how_to_continue(kernel):
    first, *rest = shown_errors(kernel.run("training.run(config, 'run')"))
    assert first.startswith("RunDirectoryError: run already holds a run; ")
    assert "resume=True" in first
    assert rest == ["(%tb shows where it comes from)"]
    traceback = shown_errors(kernel.run("%tb"))
    assert len(traceback) > 10 and traceback[-1] == first
    # The next error is told in one line again.
    assert len(shown_errors(kernel.run("training.run(config, 'run')"))) == 2


@pytest.mark.usefixtures("run")
def test_an_interrupted_run_is_continued(kernel):
    """Interrupting the cell ends it after a checkpoint; the weights come out the same."""
    interrupted = []

    def interrupt_after_two(kind, content):
        text = content.get("data", {}).get("text/plain", "")
        if " 2/12 " in text and not interrupted:
            interrupted.append(text)
            kernel.manager.interrupt_kernel()

    # Built once for both runs.
    assert not kernel.run("experiment = training.build(config)")
    outputs = kernel.run("training.run(experiment, 'stopped')", interrupt_after_two)
    first, *rest = shown_errors(outputs)
    told = re.match(r"Interrupted: stopped after round (\d+); (.*)$", first)
    done = int(told[1])
    assert 2 <= done < 12
    assert told[2] == "the same call with resume=True continues the run in stopped."
    assert len(rest) == 1
    checkpoints = kernel.run("print(*pathlib.Path('stopped/checkpoints').iterdir())")
    assert f"round_{done}" in checkpoints[0][1]["text"]

    resumed = "training.run(experiment, 'stopped', resume=True, progress=False)"
    outputs = kernel.run(f"{resumed}['rounds']")
    assert outputs[-1][1]["data"]["text/plain"] == "12"
    compared = kernel.run(
        "load = lambda run: tf.saved_model.load(f'{run}/checkpoints/round_12')()\n"
        "pairs = zip(*(tf.nest.flatten(load(run)) for run in ('run', 'stopped')), strict=True)\n"
        "[bool(np.array_equal(a, b)) for a, b in pairs]"
    )
    assert set(json.loads(compared[-1][1]["data"]["text/plain"].lower())) == {True}


def test_other_errors_are_one_line_too(kernel):
    wrong = "training.run(training.make_config('digits', num_clients=5000), 'other')"
    first, *rest = shown_errors(kernel.run(wrong))
    said = "num_clients must be at most the number of images (1439), got 5000."
    assert first == f"ConfigError: {said}"
    assert len(rest) == 1
