"""A page of HTML about one or several runs, finished or not; it needs no other file."""

import datetime
import math
import os
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import pandas as pd

from tff_fedlabel._replacing import check_free, replacing
from tff_fedlabel.training import html_parts as html
from tff_fedlabel.training import partition_table, report_figures
from tff_fedlabel.training.client_accuracy import in_short
from tff_fedlabel.training.config import OF_OLDER_RUNS
from tff_fedlabel.training.stored_run import RunDirectoryError, StoredRun

_SELECTION = {
    "kept_fraction": "share of unlabelled images kept",
    "local_fraction": "share labelled by the local model",
    "agreement_fraction": "share where both models agree",
    "pseudo_label_accuracy": "accuracy of the pseudo-labels",
}
_CURVES = {
    "test_accuracy": "test accuracy",
    "validation_accuracy": "validation accuracy",
    "test_loss": "test loss",
    "labeled_loss": "loss on labelled images",
}
_MOST_ROWS = 100


def write_report(
    run_dirs: Sequence[str | os.PathLike], output: str | os.PathLike, *, overwrite: bool = False
) -> None:
    """Writes a page about runs, with all its pictures in it.

    Args:
      run_dirs: One or more run directories; unfinished runs and such of older versions have fewer
        sections.
      output: The HTML file.
      overwrite: Whether a file that is there may be replaced.

    Raises:
      RunDirectoryError: One of them holds no run, or a file of it cannot be read.
      ValueError: `output` is there and `overwrite` is False, or it is a folder.
    """
    runs = [StoredRun(path) for path in run_dirs]
    if not runs:
        raise ValueError("there must be one run at least.")
    check_free(output, overwrite)
    page = _page(runs)
    with replacing(output) as partial:
        partial.write_text(page, encoding="utf-8")


def _page(runs: Sequence[StoredRun]) -> str:
    names = _names(runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    version = html.text(metadata.version("tff-fedlabel"))
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    parts = [
        f"<h1>{html.text(title)}</h1>",
        f'<p class="quiet">Written by tff_fedlabel {version} on {now}.</p>',
        "<h2>Results</h2>",
        _results(runs, names),
        _comparison(runs, names),
        _curves(runs, names),
        _selection(runs, names),
        _clients(runs, names),
        _partitions(runs, names),
        _configuration(runs, names),
        _rounds(runs, names),
    ]
    return html.page(title, [part for part in parts if part])


def _names(runs: Sequence[StoredRun]) -> list[str]:
    """A short name for each run; the path where folders are called alike."""
    names = [run.path.absolute().name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.path)
        for name, run in zip(names, runs, strict=True)
    ]


def _results(runs, names) -> str:
    rows: dict[str, list[str]] = {}
    for run in runs:
        for name, value in _result(run).items():
            rows.setdefault(name, []).append(value)
    table = html.table(["", *names], [[name, *values] for name, values in rows.items()])
    unfinished = [name for name, run in zip(names, runs, strict=True) if run.summary is None]
    if not unfinished:
        return table
    which = "The run is" if len(runs) == 1 else f"{', '.join(map(html.text, unfinished))}:"
    return f"{table}<p>{which} not finished; figures are those of the last evaluated round.</p>"


def _result(run: StoredRun) -> dict[str, str]:
    """What the table of results says of a run."""
    choices, summary = run.choices, run.summary or {}
    last = {**_last_evaluation(run.metrics), **summary}
    best_round, best = _best_round(run.metrics)
    seconds = summary.get("seconds_per_round")
    if seconds is None and "seconds" in run.metrics and len(run.metrics) > 1:
        seconds = run.metrics["seconds"][1:].mean()
    clients = {}
    if run.client_accuracy is not None:
        clients = in_short(run.client_accuracy)
    return {
        "task": html.text(os.path.basename(str(choices.get("task", html.NONE)))),  # Perhaps a path.
        "algorithm": html.text(choices.get("algorithm", html.NONE)),
        "model": html.text(choices.get("model", html.NONE)),
        "seed": html.text(choices.get("seed", html.NONE)),
        # The summary has none for clients that no partition made.
        "alpha": html.value(summary.get("alpha", choices.get("alpha"))),
        "labelled images": html.share(choices.get("labeled_fraction")),
        "labels at": html.text(choices.get("labels_at", OF_OLDER_RUNS["labels_at"])),
        "rounds": f"{run.rounds_done} of {html.text(choices.get('rounds', '?'))}",
        "test accuracy": html.number(last.get("test_accuracy")),
        "test loss": html.number(last.get("test_loss")),
        "validation accuracy": html.number(last.get("validation_accuracy")),
        "best validation accuracy": html.number(best),
        "in round": str(best_round) if best_round else html.NONE,
        "accuracy by client, mean": html.number(clients.get("client_accuracy_mean")),
        "worst tenth of clients": html.number(clients.get("client_accuracy_worst_tenth")),
        "seconds per round": html.number(seconds, 2),
        "runtime": html.text(_runtime(run)),
    }


def _last_evaluation(metrics: pd.DataFrame) -> dict[str, float]:
    if "test_accuracy" not in metrics:
        return {}
    evaluated = metrics.dropna(subset=["test_accuracy"])
    return evaluated.iloc[-1].to_dict() if len(evaluated) else {}


def _best_round(metrics: pd.DataFrame) -> tuple[int, float]:
    if "validation_accuracy" not in metrics or metrics["validation_accuracy"].isna().all():
        return 0, math.nan
    row = metrics.loc[metrics["validation_accuracy"].idxmax()]
    return int(row["round"]), float(row["validation_accuracy"])


def _runtime(run: StoredRun) -> str:
    used = [entry.get("runtime", "?") for entry in run.config.get("runtimes", [])]
    return ", then ".join(dict.fromkeys(used)) or html.NONE


def _comparison(runs, names) -> str:
    """The choices in which the runs differ."""
    if len(runs) < 2:
        return ""
    # A choice that did not exist when a run began had its default.
    choices = [{**OF_OLDER_RUNS, **run.choices} for run in runs]
    known = dict.fromkeys(name for of_run in choices for name in of_run if name != "parameters")
    rows = []
    for name in known:
        values = [html.value(of_run.get(name)) for of_run in choices]
        if len(set(values)) > 1:
            rows.append([html.text(name), *values])
    if not rows:
        return "<h2>Differences</h2><p>All choices of the runs are the same.</p>"
    return f"<h2>Differences</h2>{html.table(['choice', *names], rows)}"


def _curves(runs, names) -> str:
    drawn = _figures(runs, _CURVES)
    return f"<h2>Curves</h2>{_legend(names)}{drawn}" if drawn else ""


def _selection(runs, names) -> str:
    drawn = _figures(runs, _SELECTION)
    if not drawn:
        return ""
    text = "<p>What the method did with the clients' unlabelled images, round by round.</p>"
    return f"<h2>Pseudo-labels</h2>{text}{_legend(names)}{drawn}"


def _figures(runs, columns: dict[str, str]) -> str:
    tables = [run.metrics for run in runs]
    found = []
    for column, label in columns.items():
        share = "loss" not in column
        address = report_figures.curves(tables, column, share=share)
        if address is not None:
            found.append(html.figure(address, label))
    return f'<div class="grid">{"".join(found)}</div>' if found else ""


def _legend(names) -> str:
    if len(names) < 2:
        return ""
    items = []
    for index, name in enumerate(names):
        color, line = report_figures.style(index)
        css = {"dashdot": "double"}.get(line, line)
        items.append(
            f'<li><span style="border-top: 3px {css} {color}"></span>{html.text(name)}</li>'
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _clients(runs, names) -> str:
    found = []
    for run, name in zip(runs, names, strict=True):
        rows = run.client_accuracy
        if rows is None or not len(rows):
            continue
        short = in_short(rows)
        caption = (
            f"{name}: mean {short['client_accuracy_mean']:.3f}, worst tenth "
            f"{short['client_accuracy_worst_tenth']:.3f}"
        )
        found.append(html.figure(report_figures.by_client(rows), caption))
    if not found:
        return ""
    text = (
        "<p>The final model on each client's own images: its unlabelled ones, whose labels no "
        "training has seen, or, where it has none, its labelled ones.</p>"
    )
    return f'<h2>Accuracy by client</h2>{text}<div class="grid">{"".join(found)}</div>'


def _partitions(runs, names) -> str:
    """Each partition once, with the runs that have it."""
    runs_of: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        path = run.path / "partition.csv"
        if path.exists():
            runs_of.setdefault(path.read_text(encoding="utf-8"), []).append(index)
    found = []
    for indices in runs_of.values():
        path = runs[indices[0]].path / "partition.csv"
        try:
            table = partition_table.read(path)
        except ValueError as error:
            raise RunDirectoryError(str(error)) from error
        if len(runs) > 1:
            found.append(f"<h3>{', '.join(html.text(names[index]) for index in indices)}</h3>")
        found.append(f"<p>{html.text(_holdings(table))}</p>")
        if table.unlabeled is not None:
            address = report_figures.partition(table)
            alt = "Images by class and client"
            found.append(f'<div class="scroll wide"><img src="{address}" alt="{alt}"></div>')
    return f"<h2>Clients</h2>{''.join(found)}" if found else ""


def _holdings(table) -> str:
    sizes = table.sizes()
    text = (
        f"{len(sizes)} clients hold {sizes['labeled'].sum()} labelled and "
        f"{sizes['unlabeled'].sum()} unlabelled images of {table.num_classes} classes; "
        f"{sizes['total'].min()} to {sizes['total'].max()} a client."
    )
    if table.server is not None:
        text += f" The server has {table.server.sum()} labelled images."
    if table.unlabeled is None:
        return f"{text} The classes of the unlabelled images are not known."
    classes = np.count_nonzero(table.class_counts("all"), axis=1)
    seen = np.count_nonzero(table.class_counts("labeled"), axis=1)
    return (
        f"{text} A client has images of {classes.min()} to {classes.max()} classes (median "
        f"{np.median(classes):g}), labels of {seen.min()} to {seen.max()} ({np.median(seen):g})."
    )


def _configuration(runs, names) -> str:
    found = ["<h2>Configuration and environment</h2>"]
    for run, name in zip(runs, names, strict=True):
        choices = [
            [html.text(key), html.value(value)]
            for key, value in run.choices.items()
            if key != "parameters"  # They are there one by one.
        ]
        packages = [[html.text(k), html.text(v)] for k, v in run.config.get("versions", {}).items()]
        runtimes = [
            [html.text(entry.get("from_round", "?")), html.text(_one_runtime(entry))]
            for entry in run.config.get("runtimes", [])
        ]
        content = html.table(["choice", "value"], choices, "wrap")
        if packages:
            content += html.table(["package", "version"], packages, "wrap")
        if runtimes:
            content += html.table(["after round", "runtime"], runtimes, "wrap")
        is_open = " open" if len(runs) == 1 else ""
        text = html.text(name)
        found.append(f"<details{is_open}><summary>{text}</summary>{content}</details>")
    return "".join(found)


def _one_runtime(entry: dict[str, Any]) -> str:
    options = ", ".join(f"{key} {value}" for key, value in entry.get("options", {}).items())
    return f"{entry.get('runtime', '?')}{f' ({options})' if options else ''}"


def _rounds(runs, names) -> str:
    """The rows of metrics.csv with an evaluation, or all if there is none."""
    found = []
    for run, name in zip(runs, names, strict=True):
        rows = run.metrics
        if "test_accuracy" in rows and rows["test_accuracy"].notna().any():
            rows = rows.dropna(subset=["test_accuracy"])
        if not len(rows):
            continue
        which = f"the last {_MOST_ROWS} of {len(rows)}" if len(rows) > _MOST_ROWS else "all"
        rows = rows.tail(_MOST_ROWS)
        cells = [[_figure_of(column, value) for column, value in row.items()] for row in _of(rows)]
        header = [str(column).replace("_", " ") for column in rows.columns]
        summary = f"{html.text(name)}, {which}"
        found.append(f"<details><summary>{summary}</summary>{html.table(header, cells)}</details>")
    return f"<h2>Evaluated rounds</h2>{''.join(found)}" if found else ""


def _of(rows: pd.DataFrame) -> Iterable[dict[str, Any]]:
    return rows.to_dict("records")


def _figure_of(column: str, value: Any) -> str:
    whole = column == "round" or (isinstance(value, float) and value == round(value) >= 10)
    return html.number(value, 0 if whole else 4)
