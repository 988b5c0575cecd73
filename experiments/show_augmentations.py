"""Draws RandAugment's 14 operations on real images: one row per image, one column per operation.

python experiments/show_augmentations.py --dataset cifar10 --data_dir ~/data --magnitude 10
"""

import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("dataset", "digits", "one of the data sets of tff_fedlabel.datasets")
    flags.DEFINE_string("data_dir", None, "where the data lies, or is downloaded to")
    flags.DEFINE_float("magnitude", 10.0, "RandAugment's magnitude, 0 to 30")
    flags.DEFINE_integer("num_images", 4, "number of images; each gets two rows", lower_bound=1)
    flags.DEFINE_string("output", "runs/augmentations.png", "the PNG to write")


def _draw(images, magnitude):
    """A figure of uint8 images [n, h, w, c]: each operation with sign + above sign -."""
    from matplotlib import figure

    from tff_fedlabel import augmentation

    signs = (1, -1)
    grid = figure.Figure(figsize=(len(augmentation.OPERATIONS), 2.1 * len(images)))
    axes = grid.subplots(2 * len(images), len(augmentation.OPERATIONS), squeeze=False)
    floats = augmentation.to_float(images)
    for column, name in enumerate(augmentation.OPERATIONS):
        axes[0, column].set_title(name, fontsize=8)
        for offset, sign in enumerate(signs):
            outputs = augmentation.apply_operation(name, floats, magnitude, sign=sign).numpy()
            for axis, output in zip(axes[offset::2, column], outputs, strict=True):
                axis.imshow(output, cmap="gray", vmin=0, vmax=1)
                axis.set(xticks=[], yticks=[])
    for row, axis in enumerate(axes[:, 0]):
        axis.set_ylabel("+" if row % 2 == 0 else "\N{MINUS SIGN}", rotation=0, labelpad=8)
    grid.tight_layout(pad=0.3)
    return grid


def show() -> int:
    from tff_fedlabel._replacing import replacing
    from tff_fedlabel.datasets import sources

    command_line.check_output("output", FLAGS.output, folder=False)
    with command_line.wrong_values_are_usage():
        test = sources.load(FLAGS.dataset, FLAGS.data_dir).test
        grid = _draw(test.x[: FLAGS.num_images], FLAGS.magnitude)
    with replacing(FLAGS.output) as partial:
        grid.savefig(partial, dpi=120, format="png")
    print(f"picture: {FLAGS.output}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, show))
