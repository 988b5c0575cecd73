"""Peak memory of the driver and the workers, each figure from a process of its own."""

import json
import os
import subprocess
import sys
import tempfile

from benchmarks.harness import Goal, Table, peak_mb, say

_BATCH = 10
_LIMIT_SECONDS = 3600


def probe(runtime_name: str, clients: int, rounds: int) -> None:
    """Runs FedAvg with a linear model; the last line on stdout is the peak after some rounds.

    It is a JSON object, moment -> MB, of the peaks of the driver and of every worker, added up. The
    moments are "start", after the imports and the images; "data", when the datasets of the first
    round are there; and numbers of rounds.
    """
    import tensorflow_federated as tff

    import tff_fedlabel
    from benchmarks import setup
    from tff_fedlabel import runtime

    data = setup.clients(clients, 2 * _BATCH, 0)
    process = tff_fedlabel.build_fedavg(setup.linear(), tff.learning.optimizers.build_sgdm(0.01))
    peaks = {}
    with runtime.use(runtime_name) as handle:
        processes = {os.getpid(), *handle.processes}

        def record(moment: str | int) -> None:
            peaks[str(moment)] = sum(peak_mb(pid) for pid in processes)

        state = process.initialize()
        record("start")
        for done in range(1, rounds + 1):
            # Datasets are made again for each round, as in training, so that it would show if old
            # ones were kept.
            cohort = setup.round_data(data, range(clients), _BATCH, round_num=done - 1)
            if done == 1:
                record("data")
            state = process.next(state, cohort).state
            del cohort
            if done in (_early(rounds), rounds):
                record(done)
    print(json.dumps(peaks))


def _early(rounds: int) -> int:
    """The round after which memory should not grow any more."""
    return max(1, rounds // 10)


def _measure(script: str, runtime_name: str, clients: int, rounds: int) -> dict[str, float]:
    command = [sys.executable, script, f"--probe={runtime_name},{clients},{rounds}"]
    # A file, not a pipe: a process that is left over and holds a pipe open would make us wait.
    with tempfile.TemporaryFile("w+") as output:
        subprocess.run(command, stdout=output, check=True, timeout=_LIMIT_SECONDS)
        output.seek(0)
        return json.loads(output.read().splitlines()[-1])


def memory(table: Table, script: str, options, rounds: int) -> None:
    """Peaks by clients a round, and over many rounds; rows are written again after every turn.

    Args:
      table: Gets the rows.
      script: The script that calls `probe` on `--probe`.
      options: The `setup.Options`.
      rounds: The number of those many rounds.
    """
    sizes, few = ((5, 20) if options.quick else (100, 1000, 5000)), 2
    runtimes = {"tested": options.runtime, "local": "local"}
    labels = dict(runtimes)
    if options.runtime == "local":
        labels["local"] = "local (again)"
    peaks = {}
    for turn in range(options.repeats):
        for key, name in runtimes.items():
            for clients in sizes:
                say(f"  turn {turn + 1}: {labels[key]}, {clients:,} clients a round")
                measured = _measure(script, name, clients, few)
                for moment, mb in measured.items():
                    moment = "peak" if moment == str(few) else moment
                    peaks.setdefault((key, clients, moment), []).append(mb)
            say(f"  turn {turn + 1}: {labels[key]}, {rounds} rounds")
            measured = _measure(script, name, sizes[0], rounds)
            peaks.setdefault((key, "early"), []).append(measured[str(_early(rounds))])
            peaks.setdefault((key, "late"), []).append(measured[str(rounds)])
        _add_rows(table, labels, peaks, sizes, rounds)


def _add_rows(table: Table, labels, peaks, sizes, rounds: int) -> None:
    smallest, largest = sizes[0], sizes[-1]
    for clients in sizes:
        size = f"linear model, {clients:,} clients a round"
        table.add(
            size,
            f"{labels['tested']}, peak",
            f"{labels['local']}, peak",
            "MB",
            peaks["tested", clients, "peak"],
            peaks["local", clients, "peak"],
        )
        for key, label in labels.items():
            for moment, words, goal in (
                ("start", "before the first round", None),
                ("data", "with the clients' datasets, before the first round", Goal(1.1)),
            ):
                table.add(
                    size,
                    f"{label}, peak",
                    f"{label}, {words}",
                    "MB",
                    peaks[key, clients, "peak"],
                    peaks[key, clients, moment],
                    goal if key == "tested" else None,
                )
    for key, label in labels.items():
        table.add(
            "linear model",
            f"{label}, peak at {largest:,} clients a round",
            f"{label}, peak at {smallest:,} clients a round",
            "MB",
            peaks[key, largest, "peak"],
            peaks[key, smallest, "peak"],
            Goal(1.1) if key == "tested" else None,
        )
        table.add(
            f"linear model, {smallest:,} clients a round",
            f"{label}, peak after {rounds} rounds",
            f"{label}, peak after {_early(rounds)} rounds",
            "MB",
            peaks[key, "late"],
            peaks[key, "early"],
            Goal(1.1) if key == "tested" else None,
        )
