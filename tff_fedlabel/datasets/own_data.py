"""One's own data as a source and clients, as the built-in data sets are used.

What the data does not bring is made as for the built-in data sets: a test and a validation part
(80/5/15 by seed), clients (a Dirichlet partition), and which labels are hidden (a fraction).
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tff_fedlabel._validation import LABELS_AT, check_name
from tff_fedlabel.datasets import _class_folders, _own_arrays, _splits, partition
from tff_fedlabel.datasets._client_columns import NO_LABEL
from tff_fedlabel.datasets._fingerprint import Fingerprint
from tff_fedlabel.datasets._image_rows import ImageRows
from tff_fedlabel.datasets._listing import Listing
from tff_fedlabel.datasets._source_errors import DataNotFoundError
from tff_fedlabel.datasets.sources import Examples, Source

__all__ = ["OwnPath", "OwnSource", "facts", "load", "open_source"]

OwnPath = str | os.PathLike | Callable[[], Any]
_DEALING = 0xDEA1  # Separates the random stream of unlabelled images from others of the same seed.


@dataclasses.dataclass(frozen=True)
class OwnSource(Source):
    """A `Source` whose images are rows of one array, on disk; `train` has the labelled ones."""

    def fingerprint(self) -> str:
        """As of `Source`, without the pixels: those are in the fingerprint of the clients."""
        result = Fingerprint("OwnSource")
        result.add_text(str(self.num_classes))
        for examples in (self.train, self.validation, self.test):
            result.add_array(examples.x.rows)
            result.add_array(examples.y)
        return result.hex()


def open_source(source: OwnPath, name: str | None = None) -> Listing | Source:
    """Finds out what one's own data consists of, without reading the pixels.

    Args:
      source: a folder (`_class_folders`), an `.npz` file (`_own_arrays`), or a function without
        arguments that returns a mapping with the arrays of such a file, or a `sources.Source`. A
        function is called once.
      name: what the data is called in messages; default: the path's name.

    Returns:
      What there is; a `sources.Source` as the function returned it.

    Raises:
      ValueError: the data has none of these forms.
      sources.UnusableFilesError: files among the images that are none.
      sources.CorruptDataError: an `.npz` file is damaged.
      sources.DataNotFoundError: there is no such path.
    """
    if callable(source):
        made = _called(source)
        return made if isinstance(made, Source) else _own_arrays.list_arrays(made, name or "it")
    path = pathlib.Path(source)
    name = path.name
    if path.is_dir():
        return _class_folders.list_folder(path, name)
    if not path.exists():
        raise DataNotFoundError(f"there is no folder or .npz file at {path}.")
    return _own_arrays.list_npz(path, name)


@functools.lru_cache(maxsize=4)
def _called(function: Callable[[], Any]) -> Any:
    return function()


def facts(source: OwnPath, name: str | None = None) -> dict[str, Any]:
    """What the data decides, so that a run cannot choose it; see `open_source` for arguments.

    Returns:
      split: "official" if the data has a test or a validation part of its own, else "pooled".
      num_clients: number of clients that it names, or None.
      labeled_fraction: labelled share of its training images if some have no label, or None.
    """
    listing = open_source(source, name)
    if isinstance(listing, Source):
        return {"split": "official"}
    clients = None if listing.client_ids is None else len(set(listing.client_ids))
    fraction = None
    if listing.num_unlabeled:
        labeled = len(_split(listing, 0)["train"])  # As many for each seed.
        fraction = max(round(labeled / (labeled + listing.num_unlabeled), 6), 1e-6)
    return {
        "split": "pooled" if set(listing.sizes) == {"train"} else "official",
        "num_clients": clients,
        "labeled_fraction": fraction,
    }


def load(
    source: OwnPath,
    name: str | None = None,
    *,
    num_clients: int,
    alpha: float,
    labeled_fraction: float,
    scheme: str = "client",
    seed: int = 0,
    image_size: int | None = None,
    data_dir: str | None = None,
    labels_at: str = "every_client",
) -> tuple[Source, Any]:
    """Reads the images, and makes what the data does not bring.

    Args:
      source: as in `open_source`.
      name: as in `open_source`.
      num_clients: as in `partition.partition`, for data without clients. Images without label, of
        which no class can be said, are dealt out evenly.
      alpha: as in `partition.partition`.
      scheme: as in `partition.partition`.
      labeled_fraction: as in `federated.from_source`, for data whose images all have a label.
      seed: in [0, 2**31).
      image_size: side in pixels to resize to; None leaves images of one size as they are.
      data_dir: where the images that were read are kept; default: `~/.cache/tff_fedlabel`.
      labels_at: as in `federated.from_source`. Data with unlabelled images says by itself at which
        clients the labels are; with "server" the labelled images move to the server.

    Returns:
      The `OwnSource` (or the `sources.Source` that a function returned) and the
      `federated.FederatedData` of its training images. Images stay on disk and are mapped into
      memory; those of a function stay in memory.

    Raises:
      ValueError: `image_size` is out of range or missing, or the others as in `partition`.
      sources.UnusableFilesError, sources.CorruptDataError, sources.DataNotFoundError: as in
        `open_source`; or files cannot be read as images; or they cannot be kept in `data_dir`.
    """
    from tff_fedlabel.datasets import federated, server_labels  # Late: TensorFlow is slow.

    check_name("labels_at", labels_at, LABELS_AT)
    listing = open_source(source, name)
    if isinstance(listing, Source):
        parts = partition.partition(listing.train.y, num_clients, alpha, scheme=scheme, seed=seed)
        clients = federated.from_source(
            listing.train,
            parts,
            labeled_fraction,
            seed,
            num_classes=listing.num_classes,
            label_names=listing.label_names,
            labels_at=labels_at,
        )
        return listing, clients
    images, before = listing.images.read(image_size, data_dir)
    rows = _split(listing, seed)
    unlabeled = np.flatnonzero(listing.train_labels == NO_LABEL)
    classes = {"num_classes": len(listing.label_names), "label_names": listing.label_names}
    if listing.client_ids is None:
        labels = listing.y[rows["train"]]
        parts = partition.partition(labels, num_clients, alpha, scheme=scheme, seed=seed)
        parts, client_ids = [rows["train"][part] for part in parts], range(num_clients)
        dealt = _deal(unlabeled, num_clients, seed)
    else:
        owned = federated.rows_by_client(list(listing.client_ids))
        client_ids = [client for client, _ in owned]
        in_training = np.isin(np.arange(listing.sizes["train"]), rows["train"])
        without_label = listing.train_labels == NO_LABEL
        parts = [own[in_training[own]] for _, own in owned]
        dealt = [own[without_label[own]] for _, own in owned]
    if len(unlabeled):
        if labels_at == "some_clients":
            raise ValueError(
                f"labels_at must not be 'some_clients' for {listing.name}, which already decides "
                "which images have a label; leave it out."
            )
        visible = np.full(len(listing.y), NO_LABEL, np.int32)
        visible[rows["train"]] = listing.y[rows["train"]]
        pairs = zip(parts, dealt, strict=True)
        by_client = dict(zip(client_ids, pairs, strict=True))
        clients = federated.FederatedData(images, visible, by_client, **classes)
        if labels_at == "server":
            clients = server_labels.move_to_server(clients)
    else:
        clients = federated.from_source(
            Examples(images, listing.y),
            parts,
            labeled_fraction,
            seed,
            client_ids=client_ids,
            labels_at=labels_at,
            **classes,
        )
    of_parts = (np.sort(part) for part in rows.values())  # Read from disk in order.
    examples = [Examples(ImageRows(images, part), listing.y[part]) for part in of_parts]
    made = OwnSource(
        listing.name,
        *examples,
        **classes,
        has_own_clients=listing.client_ids is not None,
        note=_note(listing, rows, images, before, clients, (labeled_fraction, labels_at), seed),
    )
    return made, clients


def _split(listing: Listing, seed: int) -> dict[str, np.ndarray]:
    """Rows of the labelled images by part: training, validation, test."""
    labeled = np.flatnonzero(listing.y != NO_LABEL)
    in_train = int((listing.train_labels != NO_LABEL).sum())
    sizes = {**listing.sizes, "train": in_train}
    if set(sizes) == {"train", "validation"}:
        train, test = _splits.take_test(labeled[:in_train], seed)
        return {"train": train, "validation": labeled[in_train:], "test": test}
    split = "official" if "test" in sizes else "pooled"
    order, of_parts = _splits.split_rows(listing.name, sizes, split, seed)
    parts = np.split(labeled[order], np.cumsum(of_parts)[:-1])
    return dict(zip(("train", "validation", "test"), parts, strict=True))


def _deal(rows: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
    """Rows dealt out at random, to each client as many, but for one."""
    rng = np.random.default_rng(np.random.SeedSequence((seed, _DEALING)))
    return [np.sort(part) for part in np.array_split(rng.permutation(rows), num_clients)]


def _note(listing, rows, images, before, clients, labels, seed) -> str:
    labeled_fraction, labels_at = labels
    height, width = images.shape[1:3]
    text = f"{listing.name}: {len(images)} images of {len(listing.label_names)} classes"
    if before is None:
        text += f", {height}x{width} px, read before"
    elif str(before) == f"{height}x{width}":
        text += f", {height}x{width} px"
    else:
        text += f", resized from {before} to {height}x{width} px"
    brought, made = [], []
    number = f"{len(clients.client_ids)} clients"
    (made if listing.client_ids is None else brought).append(number)
    if listing.num_unlabeled:
        brought.append(f"{listing.num_unlabeled} images without label")
    else:
        of_what = "clients" if labels_at == "some_clients" else "images"
        made.append(f"labels kept of {labeled_fraction:.4g} of the {of_what}")
    if labels_at == "server":
        made.append("labelled images moved to the server")
    for part in ("validation", "test"):
        (brought if part in listing.sizes else made).append(f"{part} part of {len(rows[part])}")
    if brought:
        text += f"; its own: {', '.join(brought)}"
    if made:
        text += f"; made by seed {seed}: {', '.join(made)}"
    return text
