"""Picture of a partition: classes by client, and labelled against unlabelled class shares."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import numpy as np

from tff_fedlabel._validation import check_int

if TYPE_CHECKING:
    from tff_fedlabel.datasets.federated import FederatedData

_MOST_NAMED_CLASSES = 20


def class_mismatch(data: FederatedData) -> np.ndarray:
    """How far labelled and unlabelled class shares lie apart: float64 [clients] in [0, 1].

    The total variation distance, half the sum of absolute differences of the shares. NaN for a
    client that lacks labelled or unlabelled images.

    Raises:
      ValueError: the true labels of the unlabelled images are not known.
    """
    labeled, unlabeled = (_shares(data.class_counts(part)) for part in ("labeled", "unlabeled"))
    return 0.5 * np.abs(labeled - unlabeled).sum(axis=1)


def plot_partition(
    data: FederatedData, path: str, *, title: str = "", clients_shown: int = 12
) -> None:
    """Writes a PNG of three panels: images by class and client; class shares of the labelled and
    the unlabelled images of some clients; and the distance of the two for every client (as the
    paper's fig:moti2 shows for its clients).

    Args:
      data: clients with hidden labels known.
      path: the file to write; missing folders are created.
      title: shown above the panels.
      clients_shown: clients in the second panel, evenly spaced over all, >= 1.

    Raises:
      ValueError: hidden labels are not known, or `clients_shown` < 1.
    """
    clients_shown = check_int("clients_shown", clients_shown)
    # Without pyplot: no window, no global state, and the caller's own figures are left alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mismatch = class_mismatch(data)
    figure = Figure(figsize=(12, 11), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, height_ratios=[1.2, 1.2, 0.8])
    figure.suptitle(title, parse_math=False)
    _draw_counts(figure, top, data)
    number = min(clients_shown, len(data.client_ids))
    shown = np.unique(np.linspace(0, len(data.client_ids) - 1, number).round().astype(int))
    _draw_shares(figure, middle, data, shown, mismatch)
    _draw_mismatch(bottom, mismatch)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, format="png")


def _shares(counts: np.ndarray) -> np.ndarray:
    totals = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)


def _draw_counts(figure, axes, data) -> None:
    counts = data.class_counts("all").T
    image = axes.imshow(
        np.where(counts > 0, counts, np.nan), aspect="auto", interpolation="none", cmap="viridis_r"
    )
    figure.colorbar(image, ax=axes, label="images", pad=0.01)
    axes.set_title("Images by class and client (white: none)")
    axes.set_xlabel("client, in the order of client_ids")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if data.num_classes <= _MOST_NAMED_CLASSES:
        axes.set_yticks(range(data.num_classes), data.label_names, parse_math=False)
    else:
        axes.set_ylabel("class")


def _draw_shares(figure, axes, data, shown, mismatch) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    few = data.num_classes <= _MOST_NAMED_CLASSES
    colors = colormaps["tab20"] if few else colormaps["turbo"]
    # Matplotlib leaves labels with an underscore at the beginning out of a legend.
    names = [f" {name}" if name.startswith("_") else name for name in data.label_names]
    steps = np.arange(data.num_classes)
    palette = colors(steps if few else steps / (data.num_classes - 1))
    for offset, part, hatch in ((-0.21, "labeled", ""), (0.21, "unlabeled", "//")):
        shares = np.nan_to_num(_shares(data.class_counts(part))[shown])
        base = np.zeros(len(shown))
        for label in range(data.num_classes):
            axes.bar(
                np.arange(len(shown)) + offset,
                shares[:, label],
                0.38,
                bottom=base,
                color=palette[label],
                edgecolor="white",
                linewidth=0.4,
                hatch=hatch,
                label=names[label] if few and part == "labeled" else None,
            )
            base += shares[:, label]
    sizes = data.sizes()
    ticks = [
        f"{data.client_ids[k]}\n{sizes.labeled[k]} | {sizes.unlabeled[k]}\n{mismatch[k]:.2f}"
        for k in shown
    ]
    axes.set_xticks(range(len(shown)), ticks, parse_math=False)
    axes.set_xlabel("client; labelled | unlabelled images; distance of the two")
    axes.set_ylabel("share of the class")
    axes.set_ylim(0, 1)
    axes.set_title("Class shares: labelled (left, plain) against unlabelled (right, hatched)")
    if few:
        legend = axes.legend(
            loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    else:
        scale = ScalarMappable(Normalize(0, data.num_classes - 1), colors)
        figure.colorbar(scale, ax=axes, label="class", pad=0.01)


def _draw_mismatch(axes, mismatch) -> None:
    known = np.sort(mismatch[~np.isnan(mismatch)])[::-1]
    axes.bar(np.arange(len(known)), known, 1.0, color="tab:blue")
    median = f", median {np.median(known):.2f}" if len(known) else ""
    axes.set_title(
        f"Distance of labelled and unlabelled class shares, all clients, sorted{median} "
        "(0: equal, 1: no class in common)"
    )
    axes.set_ylim(0, 1)
    axes.set_xlabel("clients with both parts")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("total variation")
