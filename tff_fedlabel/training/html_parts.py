"""Pieces of a page of HTML that needs no other file: style, tables, figures, escaped text."""

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tff_fedlabel.training.stored_values import json_number

NONE = "–"

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 16px; color: #1c1e21; background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.4em 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2em 0 0.5em; padding-top: 0.4em; border-top: 1px solid #d9dce1; }
h3 { font-size: 1rem; margin: 1.2em 0 0.3em; overflow-wrap: anywhere; }
p { margin: 0.4em 0; max-width: 75ch; }
.quiet { color: #5b626b; font-size: 0.9rem; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3em 0.7em; border-bottom: 1px solid #e6e8ec; text-align: right;
  white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
td.text { text-align: left; }
thead th:not(:first-child) { white-space: normal; overflow-wrap: break-word; min-width: 7em;
  max-width: 13em; vertical-align: bottom; }
thead th { border-bottom: 2px solid #9aa1ab; }
thead span { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3;
  overflow: hidden; }
.wrap td { white-space: normal; overflow-wrap: anywhere; text-align: left; }
.grid { display: grid; gap: 16px 24px; grid-template-columns: repeat(auto-fit, minmax(min(100%,
  420px), 1fr)); }
.grid figure { max-width: 570px; }
figure { margin: 0; }
figcaption { font-size: 0.9rem; font-weight: 600; }
img { display: block; width: 100%; height: auto; }
.wide img { min-width: 860px; max-width: 1100px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 0.5em 0;
  list-style: none; }
.legend li { display: flex; align-items: center; gap: 8px; overflow-wrap: anywhere; min-width: 0; }
.legend span { flex: none; width: 28px; border-top-width: 3px; }
details { margin: 0.6em 0; }
summary { cursor: pointer; padding: 0.3em 0; }
@media (max-width: 600px) { body { padding: 10px; } th, td { padding: 0.3em 0.5em; } }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page of parts that are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table; the cells of `rows` are HTML, the header is text."""
    cells = map(text, header)
    head = "".join(f'<th><span title="{cell}">{cell}</span></th>' for cell in cells)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    attribute = f' class="{kind}"' if kind else ""
    return (
        f'<div class="scroll"><table{attribute}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(address: str, caption: str) -> str:
    """A picture under its caption."""
    told = text(caption)
    return f'<figure><figcaption>{told}</figcaption><img src="{address}" alt="{told}"></figure>'


def text(value: Any) -> str:
    """Any value as text in HTML."""
    return html.escape(str(value))


def value(value: Any) -> str:
    """A choice of a run."""
    return NONE if value is None else text(json_number(value))


def share(value: Any) -> str:
    """A number in [0, 1] as it was chosen."""
    return f"{value:.3g}" if isinstance(value, int | float) else NONE


def number(value: Any, digits: int = 4) -> str:
    """A measured number; a dash for what is missing or not finite."""
    if not isinstance(value, int | float | np.number) or not math.isfinite(value):
        return NONE
    return f"{value:.{digits}f}"
