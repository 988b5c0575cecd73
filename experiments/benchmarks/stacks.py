"""Two installations side by side: this Python's and another's, with another TensorFlow."""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from benchmarks import processes
from benchmarks.harness import Table, in_turn, peak_mb

_BATCH = 32


def round_size(quick: bool) -> tuple[int, int]:
    """Clients, and labelled as well as unlabelled steps of each."""
    return (3, 2) if quick else (10, 10)


def size_text(quick: bool) -> str:
    clients, steps = round_size(quick)
    return f"CNN, {clients} clients, {steps}+{steps} steps of {_BATCH}"


def probe(quick: bool, share_cores: bool = False) -> None:
    """Answers requests on standard input, each a line, with a line on the real standard output.

    With `share_cores`, each operation has as many threads as in a run of the trainer.

    "versions": a JSON object. "round" and "bare": "done" when a FedLabel round in the device
    runtime, or the same operations in one bare `tf.function`, have been computed. "peak": MB.
    """
    answers = processes.answers()
    import tensorflow as tf
    import tensorflow_federated as tff

    import tff_fedlabel
    from benchmarks import bare, rounds, setup
    from benchmarks.harness import runners
    from tff_fedlabel.runtime import device

    clients, steps = round_size(quick)
    if share_cores:
        device.share_cores(clients)
    images = steps * _BATCH
    data = setup.round_data(setup.clients(clients, images, images), range(clients), _BATCH)
    model, optimizer = setup.cnn(), tff.learning.optimizers.build_sgdm(0.01)
    arguments = (model, optimizer, rounds.every_image_kept())
    client_update = bare.client_update_of("fedlabel", *arguments)
    bare_round = bare.build_round(model, optimizer, client_update)
    with runners("device") as (runner,):
        versions = {
            "tensorflow": tf.__version__,
            "python": ".".join(map(str, sys.version_info[:2])),
        }
        requests = {
            "round": runner.round(tff_fedlabel.build_fedlabel(*arguments), data),
            "bare": functools.partial(bare_round, data),
            "versions": lambda: json.dumps(versions),
            "peak": lambda: str(peak_mb(os.getpid())),
        }
        processes.answer(requests, answers)


@contextlib.contextmanager
def process(
    python: str,
    script: str,
    quick: bool,
    cores: Sequence[int] | None = None,
    share_cores: bool = False,
) -> Iterator[Callable[[str], str]]:
    """Starts `probe` in another process; yields a function that sends a request.

    Args:
      python: The Python that runs it.
      script: The script that calls `probe` on `--probe`.
      quick: For `probe`.
      cores: The cores of the process, by number; by default all of this process.
      share_cores: For `probe`.
    """
    command = [python, script, f"--probe=stacks,{int(share_cores)},0"]
    with processes.process(command + (["--quick"] if quick else []), cores) as request:
        yield request


def stacks(table: Table, script: str, options, other_python: str) -> None:
    """Rounds and peak memory of this installation against another's, measured in turn.

    Args:
      table: Gets the rows.
      script: The script that calls `probe` on `--probe`.
      options: The `setup.Options`.
      other_python: The Python of an environment in which the package is installed.
    """
    size = size_text(options.quick)
    with (
        process(sys.executable, script, options.quick) as this,
        process(other_python, script, options.quick) as other,
    ):
        labels = []
        for request in (this, other):
            versions = json.loads(request("versions"))
            labels.append(f"TensorFlow {versions['tensorflow']}, Python {versions['python']}")
        for name, words in (("round", "device round"), ("bare", "bare tf.function")):
            seconds = in_turn(
                {
                    "this": functools.partial(this, name),
                    "other": functools.partial(other, name),
                },
                options.repeats,
            )
            quantities = (f"{words}, {label}" for label in labels)
            table.add(size, *quantities, "s", seconds["this"], seconds["other"])
        peaks = [[float(request("peak"))] for request in (this, other)]
        table.add(size, *(f"peak memory, {label}" for label in labels), "MB", *peaks)
