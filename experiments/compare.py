"""Runs a comparison of methods (`tff_fedlabel.studies`) and writes its table and curves.

  python experiments/compare.py --study fashion_mnist --data_dir ~/tensorflow_datasets \
      --output_dir runs/fashion_mnist --results_dir experiments/results

Stopped and started again, it continues where it was.
"""

import sys

from absl import flags

from tff_fedlabel import cli

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("study", "fashion_mnist", "name of the comparison")
    flags.DEFINE_string("data_dir", None, "where the data sets lie, or are downloaded to")
    flags.DEFINE_string("output_dir", None, "holds the run directories; required")
    flags.DEFINE_string("results_dir", None, "where table and curves go; default: --output_dir")
    flags.DEFINE_bool("verbose", False, "show TensorFlow's log and the traceback of a failure")


def compare() -> int:
    from tff_fedlabel import studies, tasks

    with cli.wrong_values_are_usage():
        tasks.check_name("study", FLAGS.study, studies.STUDIES)
    if not FLAGS.output_dir:
        raise cli.UsageError("--output_dir is required")
    study = studies.STUDIES[FLAGS.study]
    table = studies.run(study, FLAGS.output_dir, data_dir=FLAGS.data_dir)
    results_dir = FLAGS.results_dir or FLAGS.output_dir
    studies.write_results(FLAGS.study, table, FLAGS.output_dir, results_dir)
    print(table.to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(sys.argv, define_flags, compare))
