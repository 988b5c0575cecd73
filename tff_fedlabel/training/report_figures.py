"""The pictures of a report, as addresses that hold the picture itself."""

import base64
import io
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib import figure, rc_context

from tff_fedlabel.datasets import partition_plot
from tff_fedlabel.training import client_accuracy, pictures
from tff_fedlabel.training.partition_table import PartitionTable

_COLORS = (
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e"),
    *("#8c564b", "#e377c2", "#17becf", "#7f7f7f", "#bcbd22"),
)
_STYLES = ("solid", "dashed", "dotted", "dashdot")
# Rounds from which a curve is shown as a moving average, and how many such steps it then has.
_SMOOTHED_FROM, _STEPS = 80, 40


def style(index: int) -> tuple[str, str]:
    """Color and line style of the run with this number."""
    return _COLORS[index % len(_COLORS)], _STYLES[index // len(_COLORS) % len(_STYLES)]


def curves(tables: Sequence[pd.DataFrame], column: str, *, share: bool) -> str | None:
    """A column over the rounds, one line for each run; None if no run has values.

    Args:
      tables: metrics.csv of each run, in the order of `style`.
      column: The column.
      share: Whether the values are in [0, 1] and the axis too.
    """
    picture = figure.Figure(figsize=(4.4, 3.0), layout="constrained")
    axes = picture.subplots()
    drawn = 0
    for index, table in enumerate(tables):
        if column not in table:
            continue
        known = table[["round", column]].apply(pd.to_numeric, errors="coerce").dropna()
        if not len(known):
            continue
        drawn += 1
        color, line = style(index)
        values, rounds = known[column], known["round"]
        if len(known) >= _SMOOTHED_FROM:
            axes.plot(rounds, values, color=color, alpha=0.25, linewidth=0.7)
            values = values.rolling(max(2, len(known) // _STEPS), min_periods=1).mean()
        marker = "o" if len(known) <= 12 else None
        axes.plot(rounds, values, color=color, linestyle=line, marker=marker, markersize=3)
    if not drawn:
        return None
    axes.set_xlabel("round")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if share:
        axes.set_ylim(-0.02, 1.02)
    return _svg(picture)


def by_client(rows: pd.DataFrame) -> str:
    """Accuracy by client."""
    picture = pictures.client_accuracy(rows, client_accuracy.in_short(rows))
    picture.set_size_inches(4.6, 3.2)
    return _svg(picture)


def partition(table: PartitionTable) -> str:
    """Who holds which classes, for a table that knows the classes of unlabelled images."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "partition.png"
        partition_plot.plot_partition(table, str(path), clients_shown=10)
        return _address("image/png", path.read_bytes())


def _svg(picture: figure.Figure) -> str:
    # As an image of its own: the names that Matplotlib gives to parts of an SVG would clash.
    metadata: Mapping[str, None] = {"Date": None, "Creator": None}
    text = io.BytesIO()
    with rc_context({"svg.hashsalt": "report", "svg.fonttype": "path"}):
        picture.savefig(text, format="svg", metadata=metadata)
    return _address("image/svg+xml", text.getvalue())


def _address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
