"""The table of costs, beside the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from costs.passes import Passes
from costs.traffic import Traffic
from tff_fedlabel import algorithms

# tab:comp-cost of the paper: passes of a step, bytes (R is a model), seconds; h = 2 helpers.
PAPER = {
    "fedtrinet": ("3P + 2B", "2R", 7.81),
    "fedmatch": ("(h+1)P + 2B", "(2+h)R", 11.24),
    "fedlabel": ("2P + 2B", "2R", 3.76),
}
_REFERENCE = "fedlabel"


def row(
    name: str, passes: Passes | None, traffic: Traffic | None, seconds: Sequence[float] | None
) -> dict[str, Any]:
    """One method's costs; what was not measured is left out."""
    found: dict[str, Any] = {"method": name}
    if passes is not None:
        found |= {
            "passes_a_step": str(passes),
            "forward_a_step": passes.step.forward,
            "backward_a_step": passes.step.backward,
            "forward_batches_a_step": passes.step.images,
            "forward_a_labeled_step": passes.labeled.forward,
            "backward_a_labeled_step": passes.labeled.backward,
            "forward_once": passes.once.forward,
            "backward_once": passes.once.backward,
        }
    found["at_the_server"] = at_the_server(algorithms.METHODS[name])
    if traffic is not None:
        found |= {
            "bytes_down": traffic.down,
            "bytes_up": traffic.up,
            "bytes_model": traffic.model,
            "models_sent": traffic.in_models,
        }
    if seconds is not None:
        found |= {
            "seconds_per_client": statistics.median(seconds),
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "turns": len(seconds),
        }
    passes_there, models_there, seconds_there = PAPER.get(name, ("", "", None))
    return found | {
        "paper_passes": passes_there,
        "paper_sent": models_there,
        "paper_seconds": seconds_there,
    }


def at_the_server(method: algorithms.Method) -> str:
    """What the server computes beside the weighted mean."""
    parts = {
        "own aggregation": method.aggregate,
        "state": method.server_state,
        "choice of helpers": method.choose_helpers,
        "training on its labels": method.server_training,
    }
    return ", ".join(name for name, part in parts.items() if part is not None) or "none"


def markdown(table: pd.DataFrame, seconds: Mapping[str, Sequence[float]]) -> str:
    """The table for readers.

    Args:
      table: Of `row`.
      seconds: Method -> seconds per client, one for each turn, by which the ratio to FedLabel is
        the median of the ratios within turns.
    """
    lines = [["method", *_TITLES], ["---"] * (1 + len(_TITLES))]
    for found in table.to_dict("records"):
        name = found["method"]
        lines.append([name, *(text(found, seconds) for text in _TITLES.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _relative(name: str, values: Mapping[str, Any]) -> str:
    if name not in values or _REFERENCE not in values:
        return ""
    mine, theirs = values[name], values[_REFERENCE]
    if isinstance(mine, float):
        return f"{mine / theirs:.2f}"
    return f"{statistics.median(a / b for a, b in zip(mine, theirs, strict=True)):.2f}"


def _measured(found: Mapping[str, Any], column: str, form: str) -> str:
    value = found.get(column)
    return "" if value is None or pd.isna(value) else format(value, form)


_PAPER_SECONDS = {name: values[2] for name, values in PAPER.items()}
_TITLES = {
    "passes a step": lambda f, _: str(f.get("passes_a_step", "")),
    "batches forward a step": lambda f, _: _measured(f, "forward_batches_a_step", "g"),
    "passes once a round": lambda f, _: _measured(f, "forward_once", "g"),
    "paper, a step": lambda f, _: f["paper_passes"],
    "at the server": lambda f, _: f["at_the_server"],
    "KB down": lambda f, _: _kilobytes(f, "bytes_down"),
    "KB up": lambda f, _: _kilobytes(f, "bytes_up"),
    "models sent": lambda f, _: _measured(f, "models_sent", ".2f"),
    "paper": lambda f, _: f["paper_sent"],
    "s per client": lambda f, _: _measured(f, "seconds_per_client", ".4f"),
    "relative": lambda f, seconds: _relative(f["method"], seconds),
    "paper, s": lambda f, _: _measured(f, "paper_seconds", ".2f"),
    "paper, relative": lambda f, _: _relative(f["method"], _PAPER_SECONDS),
}


def _kilobytes(found, column) -> str:
    value = found.get(column)
    return "" if value is None or pd.isna(value) else f"{value / 1000:.1f}"
