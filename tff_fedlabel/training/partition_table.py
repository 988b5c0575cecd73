"""Who holds how many images of which class, as a CSV file that needs no data set to be drawn."""

from __future__ import annotations

import csv
import dataclasses
import os
from typing import Any

import numpy as np
import pandas as pd

from tff_fedlabel import _validation
from tff_fedlabel._replacing import replacing

_PARTS = ("labeled", "unlabeled")


@dataclasses.dataclass(frozen=True)
class PartitionTable:
    """Images by client, part and class. `partition_plot` draws it as it draws `FederatedData`.

    Attributes:
      client_ids: The clients.
      label_names: The classes.
      labeled: int64 [clients, classes].
      unlabeled: int64 [clients, classes], or None if the classes of these images are not known.
      unlabeled_images: int64 [clients].
      server: int64 [classes], the labelled images at the server; None if there are none.
    """

    client_ids: tuple[str, ...]
    label_names: tuple[str, ...]
    labeled: np.ndarray
    unlabeled: np.ndarray | None
    unlabeled_images: np.ndarray
    server: np.ndarray | None = None

    @property
    def num_classes(self) -> int:
        return len(self.label_names)

    def class_counts(self, part: str = "all") -> np.ndarray:
        """int64 [clients, classes] of a part: labeled, unlabeled or all.

        Raises:
          ValueError: Unknown `part`, or the classes of the unlabelled images are not known.
        """
        _validation.check_name("part", part, (*_PARTS, "all"))
        if part == "labeled":
            return self.labeled
        if self.unlabeled is None:
            raise ValueError("the classes of the unlabelled images are not known.")
        return self.unlabeled if part == "unlabeled" else self.labeled + self.unlabeled

    def sizes(self) -> pd.DataFrame:
        """Images by client: columns client_id, labeled, unlabeled, total."""
        labeled = self.labeled.sum(axis=1)
        return pd.DataFrame(
            {
                "client_id": self.client_ids,
                "labeled": labeled,
                "unlabeled": self.unlabeled_images,
                "total": labeled + self.unlabeled_images,
            }
        )

    def write(self, path: str | os.PathLike) -> None:
        """Writes two rows for each client, labeled and unlabeled: client, part, images, classes.

        Labelled images at the server are a last row, of the part "server".
        """
        with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["client", "part", "images", *self.label_names])
            for row, client in enumerate(self.client_ids):
                counts = self.labeled[row].tolist()
                writer.writerow([client, "labeled", sum(counts), *counts])
                unknown = [""] * self.num_classes
                counts = unknown if self.unlabeled is None else self.unlabeled[row].tolist()
                writer.writerow([client, "unlabeled", int(self.unlabeled_images[row]), *counts])
            if self.server is not None:
                counts = self.server.tolist()
                writer.writerow(["server", "server", sum(counts), *counts])


def of_clients(clients: Any) -> PartitionTable:
    """The table of `FederatedData`."""
    from tff_fedlabel.datasets import server_labels  # TensorFlow, which readers need not.

    known = clients.hidden_y is not None
    server = None
    if isinstance(clients, server_labels.LabelsAtServer):
        labels = clients.labeled_arrays()["y"]
        server = np.bincount(labels, minlength=clients.num_classes).astype(np.int64)
    return PartitionTable(
        tuple(map(str, clients.client_ids)),
        tuple(map(str, clients.label_names)),
        clients.class_counts("labeled"),
        clients.class_counts("unlabeled") if known else None,
        clients.sizes()["unlabeled"].to_numpy(np.int64),
        server,
    )


def read(path: str | os.PathLike) -> PartitionTable:
    """Reads what `PartitionTable.write` wrote.

    Raises:
      ValueError: The file is not such a table.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        names = tuple(header[3:])
        parts = {part: [row for row in rows if row[1] == part] for part in _PARTS}
        known = all(all(row[3:]) for row in parts["unlabeled"])
        labeled, unlabeled = (
            np.array([[int(value or 0) for value in row[3:]] for row in parts[part]], np.int64)
            for part in _PARTS
        )
        images = np.array([int(row[2]) for row in parts["unlabeled"]], np.int64)
        of_server = [np.array([int(n) for n in row[3:]]) for row in rows if row[1] == "server"]
        clients = tuple(row[0] for row in parts["labeled"])
        if not labeled.shape == unlabeled.shape == (len(clients), len(names)):
            raise ValueError("rows are missing")
    except (ValueError, LookupError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is not a table of clients and classes ({error}).") from error
    return PartitionTable(
        clients, names, labeled, unlabeled if known else None, images, *of_server[:1]
    )
