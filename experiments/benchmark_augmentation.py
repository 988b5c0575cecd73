"""Times RandAugment here against keras-cv's, in turn, inside tf.function on this machine.

python experiments/benchmark_augmentation.py

keras-cv's RandAugment has 10 of the 14 operations and other magnitudes; both get 32x32x3 images in
[0, 1], the same number of operations, and the magnitude that `RandAugment()` or `single()` has.
"""

import statistics
import sys
import time

import numpy as np
from absl import app, flags

from tff_fedlabel import augmentation  # before TensorFlow, which it keeps quiet

# isort: split
import keras_cv
import tensorflow as tf

_ALTERNATIONS = flags.DEFINE_integer("alternations", 9, "Times each is timed; >= 5.", 5)
_CALLS = flags.DEFINE_integer("calls", 5, "Calls in one timing.", 1)


def _ours(augment):
    return lambda images: augment(images, seed=0, round_num=0)


def _keras_cv(augment):
    return keras_cv.layers.RandAugment(
        value_range=(0, 1),
        augmentations_per_image=augment.num_ops,
        magnitude=augment.magnitude / augmentation.MAX_MAGNITUDE,
    )


def _milliseconds(function, images):
    start = time.perf_counter()
    for _ in range(_CALLS.value):
        function(images)
    return (time.perf_counter() - start) * 1000 / _CALLS.value


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        _exit(f"unexpected argument {argv[1]!r}")
    print(f"{'operations':>10} {'batch':>6} {'here, ms':>9} {'keras-cv, ms':>13} {'ratio':>6}")
    spec = [tf.TensorSpec([None, 32, 32, 3], tf.float32)]
    for augment in (augmentation.RandAugment.single(), augmentation.RandAugment()):
        functions = [
            tf.function(make(augment), input_signature=spec) for make in (_ours, _keras_cv)
        ]
        for batch in (64, 256):
            pixels = np.random.default_rng(0).integers(0, 256, (batch, 32, 32, 3), dtype=np.uint8)
            images = augmentation.to_float(pixels)
            for function in functions:
                function(images)  # traced here, not in the timings
            # In turn, so that whatever else the machine does falls on both.
            timings = [
                [_milliseconds(function, images) for function in functions]
                for _ in range(_ALTERNATIONS.value)
            ]
            here, theirs = (statistics.median(column) for column in zip(*timings, strict=True))
            print(
                f"{augment.num_ops:>10} {batch:>6} {here:>9.1f} {theirs:>13.1f} "
                f"{theirs / here:>6.1f}",
                flush=True,
            )


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _exit(error)


def _exit(error) -> None:
    print(f"benchmark_augmentation: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
