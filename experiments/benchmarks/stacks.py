"""Two installations side by side: this Python's and another's, with another TensorFlow."""

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from benchmarks.harness import Table, in_turn, peak_mb

_BATCH = 32


def probe(quick: bool) -> None:
    """Answers requests on standard input, each a line, with a line on the real standard output.

    "versions": a JSON object. "round" and "bare": "done" when a FedLabel round in the device
    runtime, or the same operations in one bare `tf.function`, have been computed. "peak": MB.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Nothing else may come between the answers.
    import tensorflow as tf
    import tensorflow_federated as tff

    import tff_fedlabel
    from benchmarks import bare, rounds, setup
    from benchmarks.harness import runners

    clients, steps = (3, 2) if quick else (10, 10)
    images = steps * _BATCH
    data = setup.round_data(setup.clients(clients, images, images), range(clients), _BATCH)
    model, optimizer = setup.cnn(), tff.learning.optimizers.build_sgdm(0.01)
    arguments = (model, optimizer, rounds.every_image_kept())
    client_update = bare.client_update_of("fedlabel", *arguments)
    bare_round = bare.build_round(model, optimizer, client_update)
    with runners("device") as (device,):
        requests = {
            "round": device.round(tff_fedlabel.build_fedlabel(*arguments), data),
            "bare": functools.partial(bare_round, data),
        }
        versions = {
            "tensorflow": tf.__version__,
            "python": ".".join(map(str, sys.version_info[:2])),
        }
        for line in sys.stdin:
            request = line.strip()
            if request == "versions":
                answer = json.dumps(versions)
            elif request == "peak":
                answer = str(peak_mb(os.getpid()))
            else:
                requests[request]()
                answer = "done"
            print(answer, file=answers)


@contextlib.contextmanager
def _installation(python: str, script: str, quick: bool) -> Iterator[Callable[[str], str]]:
    """Starts `probe` in another process; yields a function that sends a request."""
    command = [python, script, "--probe=stacks,0,0", *(["--quick"] if quick else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def request(text: str) -> str:
        with contextlib.suppress(BrokenPipeError):
            print(text, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{python} ended with {process.wait()} before it answered {text!r}")
        return answer.strip()

    try:
        yield request
    finally:
        process.stdin.close()
        process.wait()


def stacks(table: Table, script: str, options, other_python: str) -> None:
    """Rounds and peak memory of this installation against another's, measured in turn.

    Args:
      table: Gets the rows.
      script: The script that calls `probe` on `--probe`.
      options: The `setup.Options`.
      other_python: The Python of an environment in which the package is installed.
    """
    clients, steps = (3, 2) if options.quick else (10, 10)
    size = f"CNN, {clients} clients, {steps}+{steps} steps of {_BATCH}"
    with (
        _installation(sys.executable, script, options.quick) as this,
        _installation(other_python, script, options.quick) as other,
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
