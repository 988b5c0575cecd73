"""Checks FedLabel on a GPU: what runs on it, how far it is from a CPU, and how fast it is.

  python experiments/check_gpu.py --output gpu.md

Trains FedLabel with RandAugment on random colour images, each run in a process of its own: on the
CPU, on the GPU, deterministically, twice, and in mixed precision. The result is a table in
Markdown, to be pasted into a report. Exit code 1: there is no GPU, a run failed, or two
deterministic runs differ.
"""

import dataclasses
import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("model", "resnet18", "cnn, resnet18, resnet34 or resnet50")
    flags.DEFINE_integer("width", 32, "width of the model", lower_bound=2)
    flags.DEFINE_string("strong_augment", "paper", "paper (10 operations) or single (1)")
    flags.DEFINE_integer("rounds", 4, "rounds of each run", lower_bound=2)
    flags.DEFINE_integer("clients", 4, "clients in a round", lower_bound=1)
    flags.DEFINE_integer("steps", 4, "labelled and unlabelled steps of a client", lower_bound=1)
    flags.DEFINE_integer("batch_size", 32, "images in a batch", lower_bound=1)
    flags.DEFINE_list("runs", [], "names of runs, as the table has them; default: all of them")
    flags.DEFINE_string("output", None, "file for the table; default: the screen only")
    flags.DEFINE_bool("allow_cpu", False, "two logical CPU devices stand in, to try the script")
    flags.DEFINE_string("probe", None, "used by the script itself")


def check() -> int:
    import gpu_report

    if FLAGS.probe:
        gpu_report.probe(FLAGS.probe)
        return 0
    with command_line.wrong_values_are_usage():
        size = gpu_report.Size(
            **{
                field.name: getattr(FLAGS, field.name)
                for field in dataclasses.fields(gpu_report.Size)
            }
        )
        runs = gpu_report.chosen(FLAGS.runs)
    if FLAGS.output:
        command_line.check_output("output", FLAGS.output, folder=False)

    from tff_fedlabel import _replacing
    from tff_fedlabel.runtime import device

    gpus = device.find_gpus(required=not FLAGS.allow_cpu)
    report = gpu_report.check(size, runs, __file__, stand_in=not gpus)
    print(report.text, end="", flush=True)
    if FLAGS.output:
        with _replacing.replacing(FLAGS.output) as partial:
            partial.write_text(report.text)
    for failure in report.failures:
        print(f"check_gpu.py: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, check))
