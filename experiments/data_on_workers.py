"""Trains where the data lies: the workers read their clients' files, only ids and weights travel.

A try on one machine, with two workers, each in a terminal of its own (or with `&`):

  python experiments/data_on_workers.py --write_demo /tmp/clients --num_clients 10
  python -m tff_fedlabel.runtime.workers serve --port 8001
  python -m tff_fedlabel.runtime.workers serve --port 8002
  python experiments/data_on_workers.py --data_dir /tmp/clients --num_clients 10 \
      --addresses localhost:8001,localhost:8002

Each client is two files, ID.labeled.tfrecord and ID.unlabeled.tfrecord, of `tf.train.Example`s with
the image's bytes and, in the former, its label. With more than one machine, each needs the files of
its own clients only, in a directory of the same name: the first worker those of the first
`num_clients / workers` clients, and so on. As many clients of each worker take part in a round, and
a round's clients are dealt out to the workers in this order. If a worker is lost, so is its data:
the run then ends with an error that names the file that the other workers lack.
"""

import collections
import os
import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS
_SHAPE = (8, 8, 1)
_CLASSES = 10


def define_flags() -> None:
    flags.DEFINE_string("write_demo", None, "only write files of the digits to this directory")
    flags.DEFINE_string("data_dir", None, "directory of the clients' files, on the workers")
    flags.DEFINE_list("addresses", [], "host:port of each worker; none: the local runtime")
    flags.DEFINE_integer("num_clients", 10, "clients, over all workers")
    flags.DEFINE_integer("clients_per_worker", 2, "clients of each worker in a round")
    flags.DEFINE_integer("rounds", 10, "communication rounds")
    flags.DEFINE_integer("batch_size", 16, "images in a batch")
    flags.DEFINE_float("lr", 0.1, "learning rate of the clients' SGD")
    flags.DEFINE_integer("seed", 0, "seed of partition, model and client sampling")


def client_ids(number):
    return [f"client_{i:04d}" for i in range(number)]


def write_demo(directory, number, seed):
    """Writes the embedded digits, 30% of them labelled, as files of `number` clients."""
    import tensorflow as tf

    from tff_fedlabel.datasets import federated, partition, sources

    source = sources.load("digits", seed=seed)
    parts = partition.partition(source.train.y, number, alpha=1.0, seed=seed)
    data = federated.from_source(source.train, parts, 0.3, seed, num_classes=_CLASSES)
    os.makedirs(directory, exist_ok=True)
    for name, client_id in zip(client_ids(number), data.client_ids, strict=True):
        datasets = data.client_dataset(
            client_id, 0, labeled_steps=None, unlabeled_steps=None, batch_size=1
        )
        for part, dataset in datasets.items():
            path = os.path.join(directory, f"{name}.{part}.tfrecord")
            with tf.io.TFRecordWriter(path) as writer:
                for batch in dataset.as_numpy_iterator():
                    writer.write(_example(batch).SerializeToString())


def _example(batch):
    import tensorflow as tf

    image = tf.train.BytesList(value=[batch["x"].tobytes()])
    features = {"x": tf.train.Feature(bytes_list=image)}
    if "y" in batch:
        label = tf.train.Int64List(value=[int(batch["y"][0])])
        features["y"] = tf.train.Feature(int64_list=label)
    return tf.train.Example(features=tf.train.Features(feature=features))


def reading(process, directory, batch_size):
    """A computation like `process.next` that takes ids in place of the clients' data."""
    import numpy as np
    import tensorflow as tf
    import tensorflow_federated as tff

    def dataset(client_id, part):
        features = {"x": tf.io.FixedLenFeature([], tf.string)}
        if part == "labeled":
            features["y"] = tf.io.FixedLenFeature([], tf.int64)

        def decode(record):
            example = tf.io.parse_single_example(record, features)
            decoded = collections.OrderedDict(
                x=tf.reshape(tf.io.decode_raw(example["x"], tf.uint8), _SHAPE)
            )
            if part == "labeled":
                decoded["y"] = tf.cast(example["y"], tf.int32)
            return decoded

        path = tf.strings.join([directory, "/", client_id, ".", part, ".tfrecord"])
        # A newer TensorFlow would ask for a buffer of automatic size, which TFF's worker lacks.
        records = tf.data.TFRecordDataset(path, buffer_size=256 * 1024)
        return records.map(decode).batch(batch_size)

    # Runs on the worker: the file is opened there.
    @tff.tensorflow.computation(np.str_)
    def client_data(client_id):
        return collections.OrderedDict(
            labeled=dataset(client_id, "labeled"), unlabeled=dataset(client_id, "unlabeled")
        )

    state_type = process.next.type_signature.parameter[0]

    @tff.federated_computation(state_type, tff.FederatedType(np.str_, tff.CLIENTS))
    def next_round(state, ids):
        return process.next(state, tff.federated_map(client_data, ids))

    return next_round


def build_process(lr, seed):
    """FedLabel on a small CNN."""
    import tensorflow_federated as tff

    from tff_fedlabel import algorithms, models

    model = models.functional_model(
        models.build_keras("cnn", _SHAPE, _CLASSES, width=4, seed=seed), input_shape=_SHAPE
    )
    return algorithms.build_fedlabel(
        model,
        tff.learning.optimizers.build_sgdm(lr),
        algorithms.FedLabelConfig(strong_augment=None),
    )


def cohort(rng, ids, workers, clients_per_worker):
    """The same number of each worker's clients, in the order of the workers."""
    size = len(ids) // workers
    return [
        ids[worker * size + i]
        for worker in range(workers)
        for i in sorted(rng.choice(size, clients_per_worker, replace=False))
    ]


def train() -> int:
    number = FLAGS.num_clients
    workers = max(1, len(FLAGS.addresses))
    with command_line.wrong_values_are_usage():
        _check(number, workers)
        if FLAGS.write_demo:
            write_demo(FLAGS.write_demo, number, FLAGS.seed)
            print(f"{number} clients in {FLAGS.write_demo}")
            return 0
        from tff_fedlabel import runtime

        # Which also checks the addresses, before the process is built.
        block = (
            runtime.use("workers", addresses=FLAGS.addresses)
            if FLAGS.addresses
            else runtime.use("local")
        )
    import numpy as np

    process = build_process(FLAGS.lr, FLAGS.seed)
    next_round = reading(process, FLAGS.data_dir, FLAGS.batch_size)
    rng = np.random.default_rng(FLAGS.seed)
    ids = client_ids(number)
    with block:
        state = process.initialize()
        for round_num in range(1, FLAGS.rounds + 1):
            chosen = cohort(rng, ids, workers, FLAGS.clients_per_worker)
            output = next_round(state, chosen)
            state = output.state
            metrics = output.metrics["client_work"]["train"]
            print(
                f"round {round_num}: labelled loss {metrics['labeled_loss']:.3f}, "
                f"images used {metrics['images_used']:.0f}",
                flush=True,
            )
    return 0


def _check(number, workers):
    if bool(FLAGS.write_demo) == bool(FLAGS.data_dir):
        raise ValueError("give either --write_demo or --data_dir")
    for name in ("num_clients", "clients_per_worker", "rounds", "batch_size"):
        if FLAGS[name].value < 1:
            raise ValueError(f"--{name} must be 1 or more, got {FLAGS[name].value}")
    if number % workers or FLAGS.clients_per_worker > number // workers:
        raise ValueError(
            f"{number} clients cannot be dealt out to {workers} workers so that "
            f"{FLAGS.clients_per_worker} of each take part in a round"
        )


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, train))
