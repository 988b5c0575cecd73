"""Writes what each method costs: passes through the network, bytes, seconds, beside the paper's.

  python experiments/cost.py --output_dir runs/cost
  python experiments/cost.py --algorithms fedlabel,fedavg --measure passes,bytes

Passes are operations that the graph of a client's work executed; bytes come from the types of the
process; seconds are measured with all methods in turn. The model is sure of every image, so that
all of them pass the methods' thresholds: the most a method can cost.
"""

import pathlib
import shlex
import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS
_PARTS = ("passes", "bytes", "seconds")
_SAID = (
    *("algorithms", "measure", "clients", "tau", "batch_size", "width", "turns", "round_num"),
    "runtime",
)


def define_flags() -> None:
    flags.DEFINE_list("algorithms", "all", "methods, fedlabel,fedavg; all: every one there is")
    flags.DEFINE_list("measure", ",".join(_PARTS), "what: passes, bytes, seconds")
    flags.DEFINE_integer("clients", 4, "seconds: clients in a round")
    flags.DEFINE_integer("tau", 10, "seconds: labelled steps, and as many unlabelled ones")
    flags.DEFINE_integer("batch_size", 32, "seconds: images in a batch")
    flags.DEFINE_integer("width", 16, "bytes, seconds: width of the CNN")
    flags.DEFINE_integer("turns", 5, "seconds: how often each method is timed")
    flags.DEFINE_integer(
        "round_num", 100, "the round that is measured: late, for methods that begin otherwise"
    )
    flags.DEFINE_string("runtime", "device", "seconds: device or local")
    flags.DEFINE_string("output_dir", "runs/cost", "where cost.csv and cost.md go")


def cost() -> int:
    from tff_fedlabel import _validation, runtime

    with command_line.wrong_values_are_usage():
        if not FLAGS.measure:
            raise ValueError(f"--measure must name some of {', '.join(_PARTS)}, or be left out")
        for name in FLAGS.measure:
            _validation.check_name("measure", name, _PARTS)
        for name in ("clients", "tau", "batch_size", "width", "turns"):
            _validation.check_int(name, getattr(FLAGS, name))
        _validation.check_int("round_num", FLAGS.round_num, 0)
        here = [name for name in runtime.RUNTIMES if name != "workers"]
        _validation.check_name("runtime", FLAGS.runtime, here)
    from grids import settings, tables

    names = settings.algorithm_names()
    command_line.check_output("output_dir", FLAGS.output_dir)
    table, seconds = measure(names)
    output_dir = pathlib.Path(FLAGS.output_dir)
    tables.write_csv(output_dir / "cost.csv", table)
    from costs import table as cost_table

    text = cost_table.markdown(table, seconds)
    tables.write_text(output_dir / "cost.md", f"{_heading()}\n{text}\n{_legend()}")
    print(text)
    print(f"{output_dir / 'cost.csv'}\n{output_dir / 'cost.md'}")
    return 0


def measure(names):
    """The table of costs, and the seconds of each turn."""
    import pandas as pd
    from benchmarks import harness
    from costs import passes, subject, timing, traffic
    from costs import table as cost_table

    size = subject.Size(
        FLAGS.batch_size, FLAGS.tau, FLAGS.tau, width=FLAGS.width, round_num=FLAGS.round_num
    )
    counted, sent, seconds = {}, {}, {}
    for name in names:
        harness.say(f"{name}: {', '.join(part for part in FLAGS.measure if part != 'seconds')}")
        if "passes" in FLAGS.measure:
            counted[name] = passes.count(name, FLAGS.round_num)
        if "bytes" in FLAGS.measure:
            one = subject.Subject(name, size)
            memory = one.initial_memory()
            helpers = subject.num_helpers(one.method, memory)
            sent[name] = traffic.measure(one.process(), one.setup.model, memory, helpers)
    if "seconds" in FLAGS.measure:
        harness.say(f"seconds: {FLAGS.turns} turns")
        seconds = timing.seconds_per_client(names, size, FLAGS.clients, FLAGS.turns, FLAGS.runtime)
    rows = [
        cost_table.row(name, counted.get(name), sent.get(name), seconds.get(name)) for name in names
    ]
    return pd.DataFrame(rows), seconds


def _heading() -> str:
    return f"""# What the methods cost

    {_command()}

made it: a CNN of width {FLAGS.width} on 28x28 images, {FLAGS.tau} labelled and {FLAGS.tau}
unlabelled steps of {FLAGS.batch_size} images, {FLAGS.clients} clients a round, runtime
{FLAGS.runtime}, round {FLAGS.round_num}; every image passes the methods' thresholds.
"""


def _command() -> str:
    """What was typed, without folders of this machine."""
    parts = [FLAGS[name].serialize() for name in _SAID if FLAGS[name].present]
    return shlex.join(["python", "experiments/cost.py", *parts])


def _legend() -> str:
    return """\
* passes a step: of one labelled and one unlabelled step together; P is forward only, B forward and
  backward. batches forward a step: the same by the images in them, b images being 1 (two views in
  one pass count twice). passes once a round: forward, whatever the number of steps.
* KB down, up: of one client in a round, by the types of the process: weights, state, helpers'
  memories; update, metrics, memory where others read it. models sent: both, in sizes of the model.
* at the server: what a round does there beside the weighted mean. It is in the seconds, not in the
  passes.
* s per client: a round by its clients, the median of the turns. relative: to fedlabel, the median
  of the ratios within the turns.
* paper: its table of costs, on its authors' machine; R is the model, h = 2 helpers.
"""


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, cost))
