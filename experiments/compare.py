"""Runs a comparison of methods (`studies`) and writes its table and curves.

  python experiments/compare.py --study fashion_mnist --data_dir ~/tensorflow_datasets \
      --output_dir runs/fashion_mnist --results_dir experiments/results

Stopped and started again, it continues where it was.
"""

import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("study", "fashion_mnist", "name of the comparison")
    flags.DEFINE_string("data_dir", None, "where the data sets lie, or are downloaded to")
    flags.DEFINE_string("output_dir", None, "holds the run directories; required")
    flags.DEFINE_string("results_dir", None, "where table and curves go; default: --output_dir")


def compare() -> int:
    import studies

    from tff_fedlabel import _validation

    with command_line.wrong_values_are_usage():
        _validation.check_name("study", FLAGS.study, studies.STUDIES)
    if not FLAGS.output_dir:
        raise command_line.UsageError("--output_dir is required")
    study = studies.STUDIES[FLAGS.study]
    table = studies.run(study, FLAGS.output_dir, data_dir=FLAGS.data_dir)
    results_dir = FLAGS.results_dir or FLAGS.output_dir
    studies.write_results(FLAGS.study, table, FLAGS.output_dir, results_dir)
    print(table.to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, compare))
