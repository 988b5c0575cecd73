"""Classifies images with the model of a run.

python experiments/predict.py runs/mine photos              # a folder of PNG and JPEG files
python experiments/predict.py runs/mine images.npz          # x uint8 [n, h, w, c], perhaps y
"""

import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS
ARGUMENTS = "RUN_DIR IMAGES"
_MOST_NAMED = 10


def define_flags() -> None:
    flags.DEFINE_string("output", "predictions.csv", "the CSV to write; confusion.png goes beside")
    flags.DEFINE_bool("all_classes", False, "one column with the probability of each class")
    command_line.define_overwrite()
    command_line.define_flags_of_model()


def predict(run_dir: str, path: str) -> int:
    from tff_fedlabel import training

    training.StoredRun(run_dir)  # Before anything slow is imported.
    from tff_fedlabel.training import prediction as predictions

    with command_line.wrong_values_are_usage():
        predictions.check_output(FLAGS.output, FLAGS.overwrite)
        model = training.load_model(run_dir, best=FLAGS.best, data_dir=FLAGS.data_dir)
        images = training.find_images(path, model.class_names)
    prediction = training.predict(model, images)
    _tell_of_changes(prediction, model.image_shape)
    _tell_of_unreadable(prediction)
    if not prediction.names:
        print("nothing was classified", file=sys.stderr)
        return 1
    picture = prediction.write(FLAGS.output, FLAGS.all_classes, overwrite=FLAGS.overwrite)
    print(f"{len(prediction.names)} images: {FLAGS.output}")
    if picture is not None:
        number = int(prediction.known.sum())
        print(f"accuracy {prediction.accuracy():.4f} on {number} images of known class: {picture}")
    return 1 if prediction.unreadable else 0


def _tell_of_changes(prediction, shape) -> None:
    done = []
    if prediction.resized:
        done.append(f"{prediction.resized} resized to {shape[0]}x{shape[1]}")
    if prediction.recolored:
        done.append(f"{prediction.recolored} made {'grey' if shape[2] == 1 else 'coloured'}")
    if done:
        print(f"of {len(prediction.names)} images, {' and '.join(done)}, as the model takes them")


def _tell_of_unreadable(prediction) -> None:
    """At most ten lines."""
    wrong = prediction.unreadable
    named = wrong if len(wrong) <= _MOST_NAMED else wrong[: _MOST_NAMED - 1]
    for name, reason in named:
        print(f"cannot read {name}: {reason}", file=sys.stderr)
    if len(wrong) > len(named):
        print(f"cannot read {len(wrong) - len(named)} more", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, predict, arguments=ARGUMENTS))
