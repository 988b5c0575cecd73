"""Draws how a data set is divided across clients: classes, and labelled against unlabelled.

python experiments/show_partition.py --dataset fashion_mnist --num_clients 100 --alpha 0.1
"""

import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("dataset", "digits", "one of the data sets of tff_fedlabel.datasets")
    flags.DEFINE_string("data_dir", None, "where the data lies, or is downloaded to")
    flags.DEFINE_integer("image_size", None, "height and width in pixels; MedMNIST has several")
    flags.DEFINE_string("split", "pooled", "pooled (80/5/15) or official")
    flags.DEFINE_integer("num_clients", 20, "number of clients")
    flags.DEFINE_float("alpha", 1.0, "Dirichlet concentration; inf is IID")
    flags.DEFINE_string("scheme", "client", "client, class or client_symmetric; see partition.py")
    flags.DEFINE_float("labeled_fraction", 0.2, "share of labelled images")
    flags.DEFINE_string("labels_at", "every_client", "every_client, server or some_clients")
    flags.DEFINE_integer("seed", 0, "seed of splits, partition and labels")
    flags.DEFINE_integer("clients_shown", 12, "clients whose shares are drawn")
    flags.DEFINE_string("output", "runs/partition.png", "the PNG to write")


def show() -> int:
    from tff_fedlabel.datasets import partition, sources

    command_line.check_output("output", FLAGS.output, folder=False)
    with command_line.wrong_values_are_usage():
        source = sources.load(
            FLAGS.dataset, FLAGS.data_dir, FLAGS.split, FLAGS.seed, image_size=FLAGS.image_size
        )
        parts = partition.partition(
            source.train.y, FLAGS.num_clients, FLAGS.alpha, scheme=FLAGS.scheme, seed=FLAGS.seed
        )
        from tff_fedlabel.datasets import federated, partition_plot  # Late: TensorFlow is slow.

        data = federated.from_source(
            source.train,
            parts,
            FLAGS.labeled_fraction,
            FLAGS.seed,
            num_classes=source.num_classes,
            label_names=source.label_names,
            labels_at=FLAGS.labels_at,
        )
        partition_plot.plot_partition(
            data,
            FLAGS.output,
            title=f"{FLAGS.dataset}, {FLAGS.num_clients} clients, alpha {FLAGS.alpha:g} by "
            f"{FLAGS.scheme}, {FLAGS.labeled_fraction:.0%} labelled ({FLAGS.labels_at}), "
            f"seed {FLAGS.seed}",
            clients_shown=FLAGS.clients_shown,
        )
    print(partition.describe(parts, source.train.y))
    print(f"picture: {FLAGS.output}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, show))
