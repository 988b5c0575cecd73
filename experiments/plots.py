"""Draws runs: curves, bars, who holds which classes, and what became of the unlabelled images.

  python experiments/plots.py runs/mine runs/other --output_dir plots
  python experiments/plots.py runs/comparison --draw curves,bars

A directory that compare.py or ablate.py wrote stands for all runs in it.
"""

import pathlib
import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS
ARGUMENTS = "RUN_DIR..."
_KINDS = {
    "curves": "test accuracy over the rounds, seeds as a band",
    "bars": "test accuracy, mean of the last quarter of the evaluations",
    "partition": "who holds how many images of which class",
    "mismatch": "class shares of labelled, unlabelled and all images",
    "selection": "images kept, local model chosen, models agreeing, right labels, by round",
}


def define_flags() -> None:
    text = "; ".join(f"{name}: {what}" for name, what in _KINDS.items())
    flags.DEFINE_list("draw", None, f"what is drawn. {text}. Default: all that the runs have")
    flags.DEFINE_string("output_dir", "plots", "where the PNG files go")


def draw(*run_dirs: str) -> int:
    from grids import drawings

    from tff_fedlabel import _validation

    with command_line.wrong_values_are_usage():
        for kind in FLAGS.draw or []:
            _validation.check_name("draw", kind, _KINDS)
        found = drawings.find_runs(run_dirs)
        if not found:
            raise command_line.UsageError(f"there is no run in {', '.join(run_dirs)}")
        command_line.check_output("output_dir", FLAGS.output_dir)
        runs = drawings.Runs(found)
        for kind in FLAGS.draw or _KINDS:
            path = pathlib.Path(FLAGS.output_dir) / f"{kind}.png"
            try:
                drawn = getattr(runs, kind)(path)
            except ValueError as error:
                if FLAGS.draw:
                    raise
                print(f"no {kind}: {error}", file=sys.stderr)
            else:
                print(path if drawn is None or len(found) == 1 else f"{path} (of {drawn.path})")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, draw, arguments=ARGUMENTS))
