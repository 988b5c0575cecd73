"""Draws RandAugment's 14 operations on real images: one row per image, one column per operation.

python experiments/show_augmentations.py --dataset cifar10 --data_dir ~/data --magnitude 10
"""

import os
import sys

from absl import app, flags
from matplotlib import figure

from tff_fedlabel import augmentation
from tff_fedlabel.datasets import sources

_DATASET = flags.DEFINE_string("dataset", "digits", f"One of {', '.join(sources.NAMES)}.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where the data lies or is downloaded to.")
_MAGNITUDE = flags.DEFINE_float("magnitude", 10.0, "RandAugment's magnitude, 0 to 30.")
_NUM_IMAGES = flags.DEFINE_integer("num_images", 4, "Number of images; each gets two rows.")
_OUTPUT = flags.DEFINE_string("output", "runs/augmentations.png", "The PNG to write.")


def _draw(images, magnitude):
    """A figure of uint8 images [n, h, w, c]: each operation with sign + above sign -."""
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


def main(argv: list[str]) -> None:
    try:
        if len(argv) > 1:
            raise ValueError(f"unexpected argument {argv[1]!r}")
        if _NUM_IMAGES.value < 1:
            raise ValueError(f"--num_images must be at least 1, got {_NUM_IMAGES.value}")
        test = sources.load(_DATASET.value, _DATA_DIR.value).test
        grid = _draw(test.x[: _NUM_IMAGES.value], _MAGNITUDE.value)
        os.makedirs(os.path.dirname(_OUTPUT.value) or ".", exist_ok=True)
        grid.savefig(_OUTPUT.value, dpi=120, format="png")
    except (ValueError, OSError, sources.DataNotFoundError, sources.CorruptDataError) as error:
        _exit(error)
    print(f"picture: {_OUTPUT.value}")


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _exit(error)


def _exit(error: Exception) -> None:
    print(f"show_augmentations: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
