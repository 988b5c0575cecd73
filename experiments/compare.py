"""Compares methods: runs every cell of a grid, and writes the table and the curves.

  python experiments/compare.py --task digits --algorithms fedlabel,fedavg,fedprox --seeds 0,1,2 \
      --output_dir runs/digits --jobs 2
  python experiments/compare.py --task fashion_mnist --data_dir ~/tensorflow_datasets \
      --alphas .1,1 --labeled_fractions .05,.2 --search lr=.05,.1,.2 --search_rounds 60 \
      --accounting equal_steps --include_all_labels --output_dir runs/fashion_mnist --jobs 2

Stopped or killed, the same command continues. docs/experiments.md explains the files.
"""

import sys

from absl import flags
from grids import settings

from tff_fedlabel import command_line

FLAGS = flags.FLAGS


def define_flags() -> list[str]:
    under = {"module_name": settings.HEADING}
    flags.DEFINE_list(
        "algorithms", "all", "methods, fedlabel,fedavg; all: every one there is", **under
    )
    flags.DEFINE_string(
        "accounting",
        "one_pass",
        "what makes methods comparable. one_pass: each takes its own steps, supervised ones "
        "(FedAvg) only tau labelled ones; equal_steps: these take tau + tau', like all others",
        **under,
    )
    flags.DEFINE_bool(
        "include_all_labels",
        False,
        "also the supervised methods with all labels and tau + tau' steps: the upper bound (fedavg "
        "if --algorithms has none of them)",
        **under,
    )
    flags.DEFINE_string(
        "search",
        None,
        "choose a value for each row on validation images: lr=.05,.1,.2, or another flag of "
        "run_tff.py; test images are not looked at",
        **under,
    )
    flags.DEFINE_integer("search_rounds", 60, "rounds of each trial of the search", **under)
    flags.DEFINE_bool(
        "search_extend",
        True,
        "learning rates beyond those given while the best is at the edge",
        **under,
    )
    flags.DEFINE_string(
        "search_columns",
        "each",
        "each: search at every alpha and labelled fraction; first: at the first, for all",
        **under,
    )
    return settings.define_flags()


def compare() -> int:
    from grids import accounting, command

    from tff_fedlabel import _validation

    with command_line.wrong_values_are_usage():
        _validation.check_name("accounting", FLAGS.accounting, accounting.ACCOUNTINGS)
        _validation.check_name("search_columns", FLAGS.search_columns, ("each", "first"))
    return command.run(_comparison(settings.read()), FLAGS.jobs, "compare.py")


def _comparison(common):
    """What the command line says."""
    from grids import accounting, comparison, search, tables

    from tff_fedlabel import _validation, training

    names = settings.algorithm_names()
    with command_line.wrong_values_are_usage():
        configs = {
            name: training.make_config(common.task, name, **common.choices_for(name))
            for name in names
        }
    rows = [tables.Row(name, labels_at=configs[name].labels_at) for name in names]
    if FLAGS.include_all_labels:
        supervised = [
            name
            for name in names
            if accounting.is_supervised(name) and configs[name].labels_at == "every_client"
        ]
        rows += [tables.Row(name, all_labels=True) for name in supervised or ["fedavg"]]
    common.check_used(list(dict.fromkeys(row.algorithm for row in rows)))
    with command_line.wrong_values_are_usage():
        _validation.check_int("search_rounds", FLAGS.search_rounds)
    config = configs[names[0]]  # Where no list is given, what the task, or --alpha, says.
    searched = None
    if FLAGS.search:
        searched = search.parse(
            FLAGS.search, FLAGS.search_rounds, FLAGS.search_extend, settings.read_value
        )
        common.check_searched(searched.name, names)
    return comparison.Comparison(
        settings=common,
        rows=tables.in_order(rows),
        labeled_fractions=settings.numbers("labeled_fractions", float) or [config.labeled_fraction],
        alphas=settings.numbers("alphas", float) or [config.alpha],
        accounting=FLAGS.accounting,
        search=searched,
        search_columns=FLAGS.search_columns,
    )


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, compare, settings.EPILOGUE))
