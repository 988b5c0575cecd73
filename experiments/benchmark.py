"""What rounds cost in a runtime, as ratios of times that are measured in turn.

  python experiments/benchmark.py --benchmark round
  python experiments/benchmark.py                      # all of them, each in a process of its own

client_work  FedLabel in the runtime against the same operations in one bare tf.function
methods      every method in the runtime against the same operations in one bare tf.function
round        a FedLabel round against TFF's C++ worker
overhead     milliseconds per client with a linear model, by clients a round
memory       peak memory by clients a round, and over many rounds
shares       augmentation, labelling and skipping as parts of a FedLabel round
cores        a FedLabel round on one, two and all cores against independent processes
pfl          the CIFAR-10 benchmark of pfl-research, on one core and on two; against pfl-research
             itself with the --other_python of an environment that has it and PyTorch
stacks       this installation against another, --other_python: rounds, peak memory

One row of the CSV file is one figure: the median over the turns of A / B, and the medians of A and
B. Each is written as soon as it is measured, and replaces an older row of the same figure and CPU.
`--runtime local` compares TFF's worker with itself, which shows the noise.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS

_NAMES = ("client_work", "methods", "round", "overhead", "memory", "shares", "cores", "pfl")
_OTHERS = ("stacks",)  # not among "all": it needs a second installation
_PFL_CORES = (1, 2)
_DEFAULT_OUTPUT = pathlib.Path(__file__).parent / "results" / "benchmark.csv"


def define_flags() -> None:
    flags.DEFINE_enum("benchmark", "all", ["all", *_NAMES, *_OTHERS], "which one")
    flags.DEFINE_string("runtime", "device", "the runtime that is measured")
    flags.DEFINE_integer("repeats", 5, "turns", lower_bound=1)
    flags.DEFINE_integer("rounds", 300, "rounds over which memory is watched", lower_bound=2)
    flags.DEFINE_integer("cores", None, "cores used; default: all, for pfl 1 and then 2")
    flags.DEFINE_bool("quick", False, "small sizes, to see that it works; no default --output")
    flags.DEFINE_string("data_dir", None, "where CIFAR-10 lies, for pfl; default: random images")
    text = "stacks: the Python of the other installation; pfl: one with pfl-research and PyTorch"
    flags.DEFINE_string("other_python", None, text)
    flags.DEFINE_string("output", None, "CSV file; default: experiments/results/benchmark.csv")
    flags.DEFINE_string("probe", None, "used by benchmarks that start processes")


def benchmark() -> int:
    if FLAGS.probe:
        return _probe()
    cores = _available_cores()
    if FLAGS.benchmark == "stacks" and FLAGS.other_python is None:
        raise command_line.UsageError("--benchmark stacks needs --other_python")
    if FLAGS.benchmark not in ("stacks", "pfl") and FLAGS.other_python is not None:
        raise command_line.UsageError("--other_python is for --benchmark stacks and pfl only")
    if FLAGS.other_python is not None and shutil.which(FLAGS.other_python) is None:
        raise command_line.UsageError(f"--other_python {FLAGS.other_python} is no program")
    output = FLAGS.output or (None if FLAGS.quick else _DEFAULT_OUTPUT)
    if output is not None:
        from benchmarks import harness

        command_line.check_output("output", output, folder=False)
        with command_line.wrong_values_are_usage():
            harness.read(output)  # What is there already must be such a table.
    if FLAGS.benchmark == "all":
        return _in_processes([{"benchmark": name} for name in _NAMES])
    if FLAGS.benchmark == "pfl" and FLAGS.cores is None:
        return _in_processes([{"cores": n} for n in _PFL_CORES if n <= len(cores)])
    if FLAGS.cores is not None:
        # Before TensorFlow is imported: it makes threads for the cores that it sees at import.
        os.sched_setaffinity(0, cores[: FLAGS.cores])
    return _measure(output)


def _available_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    if FLAGS.cores is not None and not 1 <= FLAGS.cores <= len(cores):
        raise command_line.UsageError(f"--cores must be 1 to {len(cores)}, got {FLAGS.cores}")
    return cores


def _in_processes(choices: list[dict]) -> int:
    """This script again, once for each choice of flags, in fresh processes."""
    failed = []
    for choice in choices:
        changed = [f"--{name}={value}" for name, value in choice.items()]
        print(f"== {' '.join(changed)}", file=sys.stderr, flush=True)
        # If a flag is given more than once, absl takes the last value.
        code = subprocess.call([sys.executable, __file__, *sys.argv[1:], *changed])
        if code in (2, 130, 143):  # Wrong usage, or stopped.
            return code
        if code:
            failed.append(" ".join(changed))
    if failed:
        print(f"{os.path.basename(__file__)}: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _probe() -> int:
    from benchmarks import memory, pfl_setup, stacks

    name, clients, rounds = FLAGS.probe.split(",")
    if name == "stacks":
        stacks.probe(FLAGS.quick, share_cores=bool(int(clients)))
    elif name == "pfl":
        pfl_setup.probe(FLAGS.quick, FLAGS.data_dir)
    else:
        memory.probe(name, int(clients), int(rounds))
    return 0


def _measure(output: str | os.PathLike | None) -> int:
    from tff_fedlabel import _validation, runtime

    with command_line.wrong_values_are_usage():
        _validation.check_name("runtime", FLAGS.runtime, runtime.RUNTIMES)

    from benchmarks import cores, harness, memory, pfl_setup, rounds, setup, stacks
    from costs import without_tff

    table = harness.Table(FLAGS.benchmark, _command(), output, harness.hardware())
    options = setup.Options(FLAGS.runtime, FLAGS.repeats, FLAGS.quick, FLAGS.data_dir)
    functions = {
        "client_work": rounds.client_work,
        "methods": without_tff.method_rounds,
        "round": rounds.round_time,
        "overhead": rounds.overhead,
        "memory": lambda table, options: memory.memory(table, __file__, options, FLAGS.rounds),
        "shares": rounds.shares,
        "cores": lambda table, options: cores.cores(table, __file__, options),
        "pfl": lambda table, options: pfl_setup.pfl(table, __file__, options, FLAGS.other_python),
        "stacks": lambda table, options: stacks.stacks(
            table, __file__, options, FLAGS.other_python
        ),
    }
    functions[FLAGS.benchmark](table, options)
    print(table, flush=True)
    return 0


def _command() -> str:
    """The command that measures this again, without this machine's paths."""
    parts = ["python", "experiments/benchmark.py"]
    names = ("benchmark", "runtime", "repeats", "rounds", "cores", "quick", "data_dir")
    for name in (*names, "other_python"):
        flag = FLAGS[name]
        if name == "benchmark" or (flag.value != flag.default):
            value = {"data_dir": "DIR", "other_python": "PYTHON"}.get(name, flag.value)
            parts.append(f"--{name}" if value is True else f"--{name}={value}")
    return shlex.join(parts)


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, benchmark))
