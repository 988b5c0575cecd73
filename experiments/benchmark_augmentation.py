"""Times RandAugment here against keras-cv's, in turn, inside tf.function on this machine.

python experiments/benchmark_augmentation.py

keras-cv's RandAugment has 10 of the 14 operations and other magnitudes; both get 32x32x3 images in
[0, 1], the same number of operations, and the magnitude that `RandAugment()` or `single()` has.
"""

import statistics
import sys
import time

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_integer("alternations", 9, "times each is timed", lower_bound=5)
    flags.DEFINE_integer("calls", 5, "calls in one timing", lower_bound=1)


def _milliseconds(function, images):
    start = time.perf_counter()
    for _ in range(FLAGS.calls):
        function(images)
    return (time.perf_counter() - start) * 1000 / FLAGS.calls


def benchmark() -> int:
    import keras_cv
    import numpy as np
    import tensorflow as tf

    from tff_fedlabel import augmentation

    def ours(augment):
        return lambda images: augment(images, seed=(0, 0))

    def theirs_of(augment):
        return keras_cv.layers.RandAugment(
            value_range=(0, 1),
            augmentations_per_image=augment.num_ops,
            magnitude=augment.magnitude / augmentation.MAX_MAGNITUDE,
        )

    print(f"{'operations':>10} {'batch':>6} {'here, ms':>9} {'keras-cv, ms':>13} {'ratio':>6}")
    spec = [tf.TensorSpec([None, 32, 32, 3], tf.float32)]
    for augment in (augmentation.RandAugment.single(), augmentation.RandAugment()):
        functions = [tf.function(make(augment), input_signature=spec) for make in (ours, theirs_of)]
        for batch in (64, 256):
            pixels = np.random.default_rng(0).integers(0, 256, (batch, 32, 32, 3), dtype=np.uint8)
            images = augmentation.to_float(pixels)
            for function in functions:
                function(images)  # traced here, not in the timings
            # In turn, so that other work of the machine slows both alike.
            timings = [
                [_milliseconds(function, images) for function in functions]
                for _ in range(FLAGS.alternations)
            ]
            here, theirs = (statistics.median(column) for column in zip(*timings, strict=True))
            print(
                f"{augment.num_ops:>10} {batch:>6} {here:>9.1f} {theirs:>13.1f} "
                f"{theirs / here:>6.1f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, benchmark))
