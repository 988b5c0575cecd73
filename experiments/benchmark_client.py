"""What FedLabel's client work costs, and what skipping the images without a kept label saves.

  python experiments/benchmark_client.py --output experiments/results/client_work.csv

Times whole rounds of one FedLabel process that propagates all images and of one that skips those
without a kept label, in turn, at several shares of kept images. Both compute the same update. The
share is set by the confidence of a fixed model: its logits are scaled so that the wanted share of
images passes the threshold.
"""

import sys
import time

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_integer("repeats", 7, "rounds of each process at each share")
    flags.DEFINE_integer("steps", 10, "unlabelled steps of 32 images, 4 clients")
    flags.DEFINE_string("model", "cnn", "cnn, resnet18, resnet34 or resnet50")
    flags.DEFINE_integer("width", 16, "width of the model")
    flags.DEFINE_string("output", None, "CSV file; default: the screen only")


def benchmark() -> int:
    if FLAGS.output:
        command_line.check_output("output", FLAGS.output, folder=False)
    import collections

    import numpy as np
    import pandas as pd
    import tensorflow as tf
    import tensorflow_federated as tff

    import tff_fedlabel
    from tff_fedlabel import augmentation, models, pseudo_labels, runtime

    shape, classes, batch, clients = (28, 28, 1), 10, 32, 4
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (FLAGS.steps * batch, *shape)).astype(np.uint8)
    empty = collections.OrderedDict(x=images[:0], y=np.zeros(0, np.int32))

    def client_data():
        slices = tf.data.Dataset.from_tensor_slices
        return collections.OrderedDict(
            labeled=slices(empty).batch(batch),
            unlabeled=slices(collections.OrderedDict(x=images)).batch(batch),
        )

    data = [client_data() for _ in range(clients)]
    model = models.functional_model(
        models.build_keras(FLAGS.model, shape, classes, width=FLAGS.width), input_shape=shape
    )
    logits = model.predict_on_batch(model.initial_weights, images[:256], training=False)
    largest = np.sort(pseudo_labels.softmax(logits).numpy().max(axis=1))

    def process(threshold, skip):
        return tff_fedlabel.build_fedlabel(
            model,
            # So small a step that the share does not change.
            tff.learning.optimizers.build_sgdm(1e-9),
            tff_fedlabel.FedLabelConfig(
                threshold=float(threshold),
                strong_augment=augmentation.RandAugment.single(),
                skip_discarded=skip,
            ),
        )

    rows = []
    with runtime.use("local"):
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            threshold = 0.0 if share == 1.0 else largest[int((1 - share) * (len(largest) - 1))]
            processes = {skip: process(threshold, skip) for skip in (True, False)}
            seconds = collections.defaultdict(list)
            for repeat in range(FLAGS.repeats + 1):
                for skip, learning in processes.items():
                    state = learning.initialize()
                    start = time.perf_counter()
                    output = learning.next(state, data)
                    if repeat:  # The first one compiles.
                        seconds[skip].append(time.perf_counter() - start)
            train = output.metrics["client_work"]["train"]
            medians = {skip: float(np.median(times)) for skip, times in seconds.items()}
            rows.append(
                {
                    "model": FLAGS.model,
                    "width": FLAGS.width,
                    "kept_fraction": float(train["kept_fraction"]),
                    "all_images_s": medians[False],
                    "kept_images_s": medians[True],
                    "ratio": medians[True] / medians[False],
                }
            )
            print(rows[-1], file=sys.stderr)
    table = pd.DataFrame(rows)
    print(table.to_string(index=False, float_format="%.3f"))
    if FLAGS.output:
        table.to_csv(FLAGS.output, index=False, float_format="%.3f")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, benchmark))
