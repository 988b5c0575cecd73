"""Writes a page of HTML about one run, or about several beside each other.

python experiments/report.py runs/mine
python experiments/report.py runs/fedavg runs/fedlabel --output comparison.html
"""

import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS
ARGUMENTS = "RUN_DIR..."


def define_flags() -> None:
    flags.DEFINE_string("output", "report.html", "the page to write")
    command_line.define_overwrite()


def report(*run_dirs: str) -> int:
    from tff_fedlabel import training

    with command_line.wrong_values_are_usage():
        training.write_report(run_dirs, FLAGS.output, overwrite=FLAGS.overwrite)
    print(f"{len(run_dirs)} run{'s' if len(run_dirs) > 1 else ''}: {FLAGS.output}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, report, arguments=ARGUMENTS))
