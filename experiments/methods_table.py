"""Writes the table of all methods: accuracy, seconds, bytes, labels, runtimes.

  python experiments/methods_table.py --output_dir runs/methods --jobs 2

Each method is trained on digits with the task's and its own defaults; what is finished in
--output_dir is not run again. Bytes are those of cost.py, runtimes those of deployment_table.py.
"""

import pathlib
import sys

from absl import flags
from grids import settings

from tff_fedlabel import command_line

FLAGS = flags.FLAGS
_OUTPUT = pathlib.Path(__file__).parent / "results" / "methods.md"


def define_flags() -> list[str]:
    under = {"module_name": settings.HEADING}
    flags.DEFINE_list(
        "algorithms", "all", "methods, fedlabel,fedavg; all: every one there is", **under
    )
    flags.DEFINE_string(
        "output", None, "the Markdown file; default: experiments/results/methods.md", **under
    )
    return settings.define_flags(axes=("seeds",), files=False)


def write() -> int:
    from grids import command, methods

    common, names = settings.read(), settings.algorithm_names()
    common.check_used(names)
    made = methods.Methods(common, names, pathlib.Path(FLAGS.output or _OUTPUT))
    return command.run(made, FLAGS.jobs, "methods_table.py")


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, write, settings.EPILOGUE))
