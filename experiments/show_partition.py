"""Draws how a data set is divided across clients: classes, and labelled against unlabelled.

python experiments/show_partition.py --dataset fashion_mnist --num_clients 100 --alpha 0.1
"""

import sys

from absl import app, flags

from tff_fedlabel.datasets import partition, partition_plot, sources

_DATASET = flags.DEFINE_string("dataset", "digits", f"One of {', '.join(sources.NAMES)}.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where the data lies or is downloaded to.")
_SPLIT = flags.DEFINE_string("split", "pooled", "pooled (80/5/15) or official.")
_NUM_CLIENTS = flags.DEFINE_integer("num_clients", 20, "Number of clients.")
_ALPHA = flags.DEFINE_float("alpha", 1.0, "Dirichlet concentration; inf is IID.")
_SCHEME = flags.DEFINE_string("scheme", "client", "client (class mixtures) or class (shares).")
_LABELED_FRACTION = flags.DEFINE_float("labeled_fraction", 0.2, "Share of labelled images.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of splits, partition and labels.")
_CLIENTS_SHOWN = flags.DEFINE_integer("clients_shown", 12, "Clients whose shares are drawn.")
_OUTPUT = flags.DEFINE_string("output", "runs/partition.png", "The PNG to write.")


def main(argv: list[str]) -> None:
    try:
        if len(argv) > 1:
            raise ValueError(f"unexpected argument {argv[1]!r}")
        source = sources.load(_DATASET.value, _DATA_DIR.value, _SPLIT.value, _SEED.value)
        parts = partition.partition(
            source.train.y,
            _NUM_CLIENTS.value,
            _ALPHA.value,
            scheme=_SCHEME.value,
            seed=_SEED.value,
        )
        from tff_fedlabel.datasets import federated  # Late: it brings TensorFlow, which is slow.

        data = federated.from_source(
            source.train,
            parts,
            _LABELED_FRACTION.value,
            _SEED.value,
            num_classes=source.num_classes,
            label_names=source.label_names,
        )
        partition_plot.plot_partition(
            data,
            _OUTPUT.value,
            title=f"{_DATASET.value}, {_NUM_CLIENTS.value} clients, alpha {_ALPHA.value:g} by "
            f"{_SCHEME.value}, {_LABELED_FRACTION.value:.0%} labelled, seed {_SEED.value}",
            clients_shown=_CLIENTS_SHOWN.value,
        )
    except (ValueError, OSError) as error:
        _exit(error)
    print(partition.describe(parts, source.train.y))
    print(f"picture: {_OUTPUT.value}")


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _exit(error)


def _exit(error: Exception) -> None:
    print(f"show_partition: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
