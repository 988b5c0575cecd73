"""Pictures of what a trained model does: accuracy by client, confusion of classes.

Names of clients and classes are drawn as they are (`parse_math=False`): Matplotlib would read what
stands between two dollar signs as a formula, and fail where it is none.
"""

import os
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import figure

from tff_fedlabel._replacing import replacing

# Classes up to which the cells of a confusion matrix are large; beyond, they and the text shrink.
_FEW_CLASSES = 20
_MOST_NAMED_CLIENTS = 30
_COLORS = {"unlabeled": "tab:blue", "labeled": "tab:orange"}


def save(picture: figure.Figure, path: str | os.PathLike) -> None:
    """Writes a PNG, cut to what is drawn."""
    with replacing(path) as partial:
        picture.savefig(partial, dpi=110, format="png", bbox_inches="tight", pad_inches=0.1)


def client_accuracy(rows: pd.DataFrame, short: dict[str, float]) -> figure.Figure:
    """Bars of accuracy by client, lowest first, with the mean over clients.

    Args:
      rows: Columns client, accuracy (perhaps NaN) and part.
      short: `client_accuracy.in_short` of them.
    """
    rows = rows.dropna(subset="accuracy").sort_values("accuracy", kind="stable")
    picture = figure.Figure(figsize=(7, 3.4), layout="constrained")
    axes = picture.subplots()
    positions = np.arange(len(rows))
    parts = rows["part"].to_numpy()
    for part, color in _COLORS.items():
        own = parts == part
        if own.any():
            label = {
                "unlabeled": "on unlabelled images",
                "labeled": "on labelled images (trained on)",
            }[part]
            heights = rows["accuracy"].to_numpy()[own]
            axes.bar(positions[own], heights, 0.85, color=color, label=label)
    if len(rows):
        axes.axhline(short["client_accuracy_mean"], color="black", linewidth=1, label="mean")
        number = max(1, len(rows) // 10)
        worst = short["client_accuracy_worst_tenth"]
        axes.plot([-0.5, number - 0.5], [worst, worst], color="tab:red", label="mean, worst tenth")
        picture.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
        axes.set_xlim(-0.6, len(rows) - 0.4)
    if len(rows) <= _MOST_NAMED_CLIENTS:
        names = rows["client"].astype(str).tolist()
        long = max(map(len, names), default=0) > 3
        axes.set_xticks(positions, names, rotation=90 if long else 0, parse_math=False)
        axes.set_xlabel("client")
    else:
        axes.set_xlabel("clients, lowest accuracy first")
    axes.set(ylim=(0, 1), ylabel="accuracy", title="Final model, by client")
    axes.grid(axis="y", alpha=0.3)
    return picture


def confusion(counts: np.ndarray, names: Sequence[str], title: str) -> figure.Figure:
    """A confusion matrix: counts as numbers, shares of the true class as colours.

    Args:
      counts: int [classes, classes], rows are true classes.
      names: The names of the classes.
      title: Shown above.
    """
    number = len(names)
    few = number <= _FEW_CLASSES
    cell, size = (0.48, 9.0) if few else (0.36, 7.0)
    longest = min(max(map(len, map(str, names))), 24)
    # Without a layout engine, which misplaces labels beside so many ticks; `save` cuts to size.
    picture = figure.Figure(figsize=[max(number * cell, 2.5)] * 2)
    axes = picture.add_axes([0.0, 0.0, 1.0, 1.0])
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    bar = picture.colorbar(image, ax=axes, fraction=0.04, pad=0.03)
    bar.set_label("share of the true class", fontsize=size)
    bar.ax.tick_params(labelsize=size)
    for row, column in np.argwhere(counts > 0):
        color = "white" if shares[row, column] > 0.5 else "black"
        text = str(counts[row, column])
        small = size if len(text) <= 4 else size * 4 / len(text)
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=small)
    short = [name if len(name) <= 24 else f"{name[:23]}…" for name in map(str, names)]
    flat = longest <= 2
    axes.set_xticks(
        range(number), short, rotation=0 if flat else 90, fontsize=size, parse_math=False
    )
    axes.set_yticks(range(number), short, fontsize=size, parse_math=False)
    axes.set_xlabel("predicted", fontsize=size + 1)
    axes.set_ylabel("true", fontsize=size + 1)
    axes.set_title(title, fontsize=size + 2)
    # Lines between the cells, for the eye to follow a row to its name.
    axes.set_xticks(np.arange(number + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(number + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="0.85", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    return picture
