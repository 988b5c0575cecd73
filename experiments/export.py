"""Writes the model of a run for programs without this package.

python experiments/export.py runs/mine model           # a SavedModel that serves uint8 images
python experiments/export.py runs/mine model.keras     # a Keras 2 model of standard layers
python experiments/export.py runs/mine model.npz       # NumPy arrays
"""

import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS
ARGUMENTS = "RUN_DIR OUT"


def define_flags() -> None:
    command_line.define_overwrite()
    command_line.define_flags_of_model()


def export(run_dir: str, out: str) -> int:
    from tff_fedlabel import training

    training.StoredRun(run_dir)  # Before anything slow is imported.
    from tff_fedlabel.training import exporting

    with command_line.wrong_values_are_usage():
        exporting.check_target(out, FLAGS.overwrite)
        model = training.load_model(run_dir, best=FLAGS.best, data_dir=FLAGS.data_dir)
        exporting.export(model, out, overwrite=FLAGS.overwrite)
    height, width, channels = model.image_shape
    print(
        f"{out}: {model.run.choices['model']} after round {model.round_num}, images "
        f"{height}x{width}x{channels}, {len(model.class_names)} classes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, export, arguments=ARGUMENTS))
