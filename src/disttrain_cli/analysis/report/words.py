"""Figures and tables of the report as escaped HTML text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from typing import TypeVar

from disttrain_cli.analysis.figures import figure as figure
from disttrain_cli.analysis.figures import seconds as seconds

Row = TypeVar("Row")
#: Columns of a table: their headers, and the cell of a row as escaped HTML.
Columns = Sequence[tuple[str, Callable[[Row], str]]]

#: Longer names are cut.
LONGEST_NAME = 2000
#: Names of the causes in the report.
CAUSES = {
    "unit": "GPUs shared unevenly between units",
    "intra_microbatch": "uneven data over replicas",
    "inter_microbatch": "uneven data over slots",
    "stage": "uneven stages",
    "worker": "slow ranks",
    "experts": "expert load",
    "communication": "transfers",
    "data": "waiting for data",
    "host": "hosts",
    "unexplained": "unexplained",
}


def percent(fraction: float | None) -> str:
    """Format 0.1234 as "12.3 %"; a dash for None."""
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def prose(text: str) -> str:
    """Escape text, with non-breaking spaces between figures and units."""
    return re.sub(r"(\d) (?=[%a-zµG])", "\\1\u00a0", escape(text))


_SAID = {"cp_rank": "CP rank"}


def place(**parts: object) -> str:
    """Format the known parts of a location: "llm · stage 0 · replica 1"; escaped."""
    named = [
        str(value) if name in ("unit", "host") else f"{_SAID.get(name, name)} {value}"
        for name, value in parts.items()
        if value is not None
    ]
    return escape(" · ".join(named))


def kernel(name: str) -> str:
    """Format a name from a trace, escaped.

    The page truncates long names, and shows them in full on hover or tap.
    """
    full_name = escape(name[:LONGEST_NAME])
    return f'<code class="name" tabindex="0" title="{full_name}">{full_name}</code>'


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, label: str = "", narrow: bool = False
) -> str:
    """Return an HTML table whose rows begin with row headers; all text must be escaped already.

    Args:
        head: column headers.
        rows: cells.
        label: accessible name of the table; "" for its first columns.
        narrow: no wider than its text.
    """
    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(f"<td>{cell}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return scrolled(
        f"<table{' class=narrow' if narrow else ''}><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody>"
        "</table>",
        label or ", ".join(head[:2]),
    )


def grid(
    rows: Sequence[Row], columns: Columns[Row], *, label: str = "", narrow: bool = False
) -> str:
    """Return the `table` of these columns."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return table([header for header, _ in columns], cells, label=label, narrow=narrow)


def card(
    title: str,
    note: str,
    rows: Sequence[Row],
    columns: Columns[Row],
    name: str = "",
    *,
    shown: int | None = None,
    narrow: bool = False,
) -> str:
    """Return a `section` with a `grid`, whose rows after the first `shown` are folded.

    Without rows it is empty.
    """
    if not rows:
        return ""
    body = grid(rows[:shown], columns, label=title, narrow=narrow)
    if shown is not None and len(rows) > shown:
        body += folded(f"{len(rows) - shown} more", grid(rows[shown:], columns))
    return section(title, note, body, name)


def scrolled(body: str, label: str) -> str:
    """Wrap content that may be wider than the page in a box that scrolls.

    It scrolls by finger, wheel or arrow keys.
    """
    return (
        '<div class="scroll" tabindex="0" role="region"'
        f' aria-label="{escape(label, quote=True)}">{body}</div>'
    )


def section(title: str, note: str, body: str, name: str = "") -> str:
    """Return a card; `title` and `note` must be escaped already."""
    about = f' id="{name}"' if name else ""
    return (
        f"<section{about}><h2>{title}</h2>"
        + (f'<p class="note">{note}</p>' if note else "")
        + f"{body}</section>"
    )


def folded(summary: str, body: str) -> str:
    """Return content that is opened on demand, and in print."""
    return f"<details><summary>{summary}</summary>{body}</details>"
