"""How well the final global model does for each client, on images of the client's own.

The images are those of the client whose labels no training has seen: its unlabelled images, whose
labels are hidden but known in a simulation. A method may have trained on these images with labels
of its own making, as it does in use. A client without unlabelled images, or whose hidden labels are
not known, is measured on its labelled images, on which the model was trained with their labels; the
column `part` says so.
"""

import os
import pathlib
from typing import Any

import numpy as np
import pandas as pd

from tff_fedlabel._replacing import replacing

FILE = "client_accuracy.csv"
PICTURE = "client_accuracy.png"


def measure(model: Any, weights: Any, clients: Any) -> pd.DataFrame:
    """Accuracy of a model by client.

    Args:
      model: A `tff.learning.models.FunctionalModel`, outputs logits `[batch, classes]`.
      weights: `tff.learning.models.ModelWeights`.
      clients: The `FederatedData`.

    Returns:
      One row for each client in the order of `client_ids`: client, images (how many it was measured
      on), accuracy (NaN without images), part ("unlabeled" or "labeled").
    """
    from tff_fedlabel.training import evaluation  # TensorFlow, which readers of the files need not.

    sizes = clients.sizes()
    hidden = clients.hidden_y is not None
    parts = ["unlabeled" if hidden and n else "labeled" for n in sizes["unlabeled"]]
    labels = []

    def batches():
        for client, part in zip(clients.client_ids, parts, strict=True):
            images = clients.client_arrays(client, part)
            labels.append(images["y"])
            yield from evaluation.batches_of(images["x"])

    # One pass over all clients, so that clients with few images leave no core idle.
    predicted = [logits.argmax(-1) for logits in evaluation.logits_of(model, weights, batches())]
    counts = np.array([len(own) for own in labels])
    hits = np.concatenate([*predicted, []]) == np.concatenate([*labels, []])
    owners = np.repeat(np.arange(len(counts)), counts)
    correct = np.bincount(owners, hits, minlength=len(counts))
    with np.errstate(invalid="ignore"):
        accuracy = correct / counts
    return pd.DataFrame(
        {"client": clients.client_ids, "images": counts, "accuracy": accuracy, "part": parts}
    )


def in_short(rows: pd.DataFrame) -> dict[str, float]:
    """The mean over clients with images, and over the worst tenth of them (one at least).

    Every client counts the same, however many images it has. Of 20 to 29 clients the two with the
    lowest accuracy are the worst tenth. Both are NaN if no client has images.
    """
    known = np.sort(rows["accuracy"].dropna().to_numpy())
    worst = known[: max(1, len(known) // 10)]
    nothing = float("nan")
    return {
        "client_accuracy_mean": float(known.mean()) if len(known) else nothing,
        "client_accuracy_worst_tenth": float(worst.mean()) if len(known) else nothing,
    }


def write(rows: pd.DataFrame, folder: str | os.PathLike) -> None:
    """Writes client_accuracy.csv and client_accuracy.png to a folder."""
    from tff_fedlabel.training import pictures  # Matplotlib takes a second.

    folder = pathlib.Path(folder)
    with replacing(folder / FILE) as partial:
        rows.to_csv(partial, index=False)
    pictures.save(pictures.client_accuracy(rows, in_short(rows)), folder / PICTURE)
