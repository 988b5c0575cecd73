"""Writes the table of all methods: accuracy, seconds, bytes, labels, runtimes.

  python experiments/methods_table.py --output_dir runs/methods

Each method is trained on digits with the task's and its own defaults; what is finished in
--output_dir is not run again. Bytes are those of cost.py, runtimes those of deployment_table.py.
"""

import pathlib
import sys

from absl import flags
from grids import settings

from tff_fedlabel import command_line

FLAGS = flags.FLAGS


def define_flags() -> list[str]:
    under = {"module_name": settings.HEADING}
    flags.DEFINE_list(
        "algorithms", "all", "methods, fedlabel,fedavg; all: every one there is", **under
    )
    text = "the Markdown file; default: methods.md in --output_dir"
    flags.DEFINE_string("output", None, text, **under)
    return settings.define_flags(axes=("seeds",), files=False)


def write() -> int:
    from grids import command, methods

    common, names = settings.read(), settings.algorithm_names()
    common.check_used(names)
    output = pathlib.Path(FLAGS.output or common.output_dir / "methods.md")
    command_line.check_output("output", output, folder=False)
    made = methods.Methods(common, names, output)
    return command.run(made, FLAGS.jobs, "methods_table.py")


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, write, settings.EPILOGUE))
