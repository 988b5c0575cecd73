"""Clients without labels, and the labelled images at the server."""

import collections

import numpy as np

from tff_fedlabel.datasets._federated_data import FederatedData
from tff_fedlabel.datasets._fingerprint import Fingerprint


class LabelsAtServer(FederatedData):
    """Clients that have unlabelled images only, while all labelled images are at the server.

    Made by `move_to_server`. What is said of clients (`sizes`, `class_counts`, `client_dataset`
    and so on) is about the images that they still have; `labeled_arrays` has those of the server.

    Attributes:
      server_rows: int64 [n], the rows of the server's images.
    """

    def __init__(self, x, y, rows, *, server_rows: np.ndarray, **facts):
        """As `FederatedData`, and the rows of the server's images, which no client has."""
        super().__init__(x, y, rows, **facts)
        self.server_rows = server_rows

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; {len(self.server_rows)} labelled images at the server)"

    def labeled_arrays(self) -> collections.OrderedDict:
        """The labelled images at the server: OrderedDict(x=[n, ...], y=int32 [n])."""
        return collections.OrderedDict(x=self._x[self.server_rows], y=self._y[self.server_rows])

    def fingerprint(self) -> str:
        """As in `FederatedData`; it covers which images are at the server."""
        result = Fingerprint("LabelsAtServer")
        result.add_text(super().fingerprint())
        result.add_array(np.asarray(self.server_rows, np.int64))
        return result.hex()


def move_to_server(data: FederatedData) -> LabelsAtServer:
    """The same images, those with a label at the server instead of at their clients.

    The server's are in the order of the clients. Data whose labelled images are there already is
    returned as it is.
    """
    if isinstance(data, LabelsAtServer):
        return data
    rows = data._rows
    labeled = np.concatenate([labeled for labeled, _ in rows.values()])
    return LabelsAtServer(
        data._x,
        data._y,
        {client: (own[:0], unlabeled) for client, (own, unlabeled) in rows.items()},
        server_rows=labeled,
        num_classes=data.num_classes,
        label_names=data.label_names,
        hidden_y=data.hidden_y,
    )
