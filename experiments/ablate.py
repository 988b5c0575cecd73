"""Varies one choice at a time, and draws what it changes: the paper's ablations.

  python experiments/ablate.py --task digits --output_dir runs/ablations --jobs 2
  python experiments/ablate.py --vary threshold --vary tau=5,10,20 --seeds 0,1,2 \
      --task fashion_mnist --data_dir ~/tensorflow_datasets --output_dir runs/ablations
  python experiments/ablate.py --vary threshold=.1,.9/strong_augment=single,none \
      --output_dir runs/ablations

Stopped or killed, the same command continues; figures share the runs that they have in common.
"""

import sys

from absl import flags
from grids import settings

from tff_fedlabel import command_line

FLAGS = flags.FLAGS
_NAMES = (
    "consistency_weight (lambda_0), tau, threshold (beta), confidence, strong_augment, selection, "
    "labeled_fraction, alpha"
)


def define_flags() -> list[str]:
    under = {"module_name": settings.HEADING}
    flags.DEFINE_list(
        "algorithms", "fedlabel", "methods, one line each; all: every one there is", **under
    )
    flags.DEFINE_multi_string(
        "vary",
        None,
        f"what is varied, may be given several times: {_NAMES}; or any flag of run_tff.py with "
        "values, tau=5,10; or two, the second one making the lines of the figure, "
        "threshold=.1,.9/strong_augment=single,none. Default: all that are named here",
        **under,
    )
    return settings.define_flags(axes=("seeds",))


def ablate() -> int:
    from grids import command

    return command.run(_ablations(settings.read()), FLAGS.jobs, "ablate.py")


def _ablations(common):
    """What the command line says."""
    from grids import ablation

    from tff_fedlabel import training

    names = settings.algorithm_names()
    common.check_used(names)
    with command_line.wrong_values_are_usage():
        config = training.make_config(common.task, names[0], **common.choices_for(names[0]))
    known = ablation.of_the_paper(config.strong_augment)
    if FLAGS.vary:
        chosen = [ablation.parse(text, known, settings.read_value) for text in FLAGS.vary]
        names_of = [one.name for one in chosen]
        for name in names_of:
            if names_of.count(name) > 1:
                raise command_line.UsageError(
                    f"--vary has {name} twice, and both would be the same file; give all values at "
                    "once"
                )
    else:
        chosen = [a for a in known.values() if any(ablation.fits(name, a) for name in names)]
    return ablation.Ablations(common, names, chosen)


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, ablate, settings.EPILOGUE))
