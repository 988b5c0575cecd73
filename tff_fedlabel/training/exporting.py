"""Exports the model of a run for programs that do not have this package.

The ending of the name decides:

  NAME.keras  a Keras 2 model of standard layers, from pixels 0 to 255 to logits; the names of the
              classes are in NAME.classes.json beside it
  NAME.npz    NumPy arrays: the weights by name, and `architecture`, the layers as JSON text
  NAME        a SavedModel that serves uint8 images; the names of the classes are its asset
              classes.json
"""

import json
import os
import pathlib
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf

from tff_fedlabel._replacing import OutputError, check_free, replacing
from tff_fedlabel.training import keras_model
from tff_fedlabel.training.trained_model import TrainedModel

_CLASSES = "classes.json"


class ExportError(OutputError):
    """The model cannot be written to where it should be, or not in that form."""


def check_target(out: str | os.PathLike, overwrite: bool = False) -> pathlib.Path:
    """Returns the path of an export that may be written.

    Raises:
      ExportError: Something is there and `overwrite` is False, or it is nothing that an export may
        replace: a folder that is no SavedModel, or a folder where a file is to be written.
    """
    out = pathlib.Path(out)
    file = out.suffix in (".keras", ".npz")
    if not out.name or (not file and out.suffix in (".h5", ".hdf5", ".tflite", ".onnx", ".pb")):
        raise ExportError(
            f"{out} is none of the forms that can be written: NAME.keras, NAME.npz, or the name of "
            "a folder for a SavedModel."
        )
    if not file:
        check_free(out, overwrite, kind="SavedModel", is_kind=_is_saved_model, error=ExportError)
    else:
        for path in [out, *([_classes_beside(out)] if out.suffix == ".keras" else [])]:
            check_free(path, overwrite, error=ExportError)
    return out


def export(model: TrainedModel, out: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Writes a trained model; the form is decided by the ending of `out` (see this module).

    A run in mixed precision is exported so that it computes as the run did, except as `.npz`, which
    says nothing of it.

    Args:
      model: What `load_model` returned.
      out: The file or folder to be written. It is written under another name and renamed.
      overwrite: Whether an earlier export there may be replaced.

    Raises:
      ExportError: See `check_target`; or the model is one's own, and `out` no SavedModel.
    """
    out = check_target(out, overwrite)
    if model.is_own and out.suffix in (".keras", ".npz"):
        raise ExportError(
            f"{out.suffix} is for the models that have names; save a model of your own with Keras "
            "(load_model(...).keras.save), or as a SavedModel: a name without ending."
        )
    if out.suffix == ".keras":
        with replacing(out) as partial:
            keras_model.with_standard_layers(model.keras).save(partial)
        with replacing(_classes_beside(out)) as partial:
            partial.write_text(_class_names(model))
    elif out.suffix == ".npz":
        with replacing(out) as partial, partial.open("wb") as file:
            text = json.dumps(_description(model))
            np.savez(file, architecture=text, **keras_model.named_weights(model.keras))
    else:
        with replacing(out) as partial, tempfile.TemporaryDirectory() as folder:
            classes = pathlib.Path(folder) / _CLASSES
            classes.write_text(_class_names(model))
            served = _Served(model, str(classes))
            tf.saved_model.save(served, str(partial), signatures=served.serve)


def _is_saved_model(path: pathlib.Path) -> bool:
    return (path / "saved_model.pb").exists()


class _Served(tf.Module):
    """The model as a SavedModel holds it: variables and one graph, nothing of Keras."""

    def __init__(self, model: TrainedModel, classes: str):
        super().__init__()
        self.classes = tf.saved_model.Asset(classes)
        trainable, constant = model.functional.initial_weights
        self.trained = [tf.Variable(w, trainable=True) for w in trainable]
        self.constant = [tf.Variable(w, trainable=False) for w in constant]
        spec = tf.TensorSpec([None, *model.image_shape], tf.uint8, name="images")

        @tf.function(input_signature=[spec])
        def serve(images):
            weights = tuple(map(tf.convert_to_tensor, self.trained))
            others = tuple(map(tf.convert_to_tensor, self.constant))
            predict = model.functional.predict_on_batch
            logits = predict((weights, others), images, training=False)
            return {
                "logits": logits,
                "probabilities": tf.nn.softmax(logits),
                "class_index": tf.argmax(logits, axis=-1, output_type=tf.int32),
            }

        self.serve = serve


def _classes_beside(out: pathlib.Path) -> pathlib.Path:
    return out.with_name(f"{out.stem}.{_CLASSES}")


def _class_names(model: TrainedModel) -> str:
    return json.dumps(list(model.class_names), indent=2) + "\n"


def _description(model: TrainedModel) -> dict[str, Any]:
    """What a reader of the weights must know to compute with them."""
    choices = model.run.choices
    return {
        "model": choices["model"],
        "image_shape": list(model.image_shape),
        "pixels": "0 to 255, divided by 255",
        "class_names": list(model.class_names),
        "layers": keras_model.architecture(model.keras),
        "run": {
            "task": os.path.basename(choices["task"]),  # Of a path, no more than its end.
            "algorithm": choices["algorithm"],
            "seed": choices["seed"],
            "round": model.round_num,
        },
    }
