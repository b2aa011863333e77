"""Heat map of layer × expert: rows that chose an expert over the mean of its layer."""

from __future__ import annotations

from html import escape

from disttrain_cli.analysis.report.words import figure, folded, grid, scrolled, section
from disttrain_cli.analysis.result.rows import ExpertRow
from disttrain_cli.analysis.result.summary import Analysis

#: Layers drawn, those with the fullest experts, and width of the columns together in pixels.
MOST_LAYERS, WIDTH = 32, 960
#: Load over the mean at which a cell has its full colour.
FULL = 3.0
_HEIGHT, _LEFT = 18, 64


def experts(analysis: Analysis) -> str:
    """Return the section; empty text for models without experts."""
    if not analysis.experts:
        return ""
    by_module: dict[str, list[ExpertRow]] = {}
    for row in analysis.experts:
        by_module.setdefault(row.module, []).append(row)
    rows = grid(
        analysis.experts,
        [
            ("Module", lambda row: escape(row.module)),
            ("Layer", lambda row: str(row.layer)),
            ("Experts", lambda row: str(len(row.rows))),
            ("Mean rows", lambda row: figure(sum(row.rows) / len(row.rows))),
            ("Fullest ÷ mean", lambda row: f"{row.load:.2f}"),
            ("Expert", lambda row: str(row.fullest)),
            ("In use", lambda row: f"{row.in_use:.1f}"),
            ("Collapsed", lambda row: "yes" if row.collapsed else "no"),
        ],
    )
    return section(
        "Layer × expert",
        "Rows that chose an expert, per step over all ranks. Red experts have more than the mean of"
        " their layer, blue ones less. In use: equally full experts with the same entropy.",
        "".join(_map(module, of_module) for module, of_module in by_module.items())
        + folded("As a table", rows),
        "experts",
    )


def _map(module: str, rows: list[ExpertRow]) -> str:
    fullest = sorted(rows, key=lambda row: -row.load)[:MOST_LAYERS]
    shown = sorted(fullest, key=lambda row: row.layer)
    count = max(len(row.rows) for row in shown)
    width = max(4, min(40, WIDTH // count))
    parts = []
    for index, row in enumerate(shown):
        mean, y = sum(row.rows) / len(row.rows), index * _HEIGHT
        parts.append(f'<text x="0" y="{y + 13}">layer {row.layer}</text>')
        for expert, value in enumerate(row.rows):
            load = value / mean
            away = (load - 1.0) / (FULL - 1.0) if load >= 1.0 else 1.0 - load
            parts.append(
                f'<rect class="{"hot" if load >= 1.0 else "cool"}" x="{_LEFT + width * expert}"'
                f' y="{y}" width="{width - 1}" height="{_HEIGHT - 1}"'
                f' fill-opacity="{min(0.9, 0.9 * away):.2f}"><title>expert {expert}: {load:.2f}'
                "</title></rect>"
            )
    title = f"Rows by expert of {escape(module)} over the mean of their layer"
    w, h = _LEFT + width * count, _HEIGHT * len(shown)
    drawn = (
        f'<svg class="heat" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img"'
        f' aria-label="{title}">{"".join(parts)}</svg>'
    )
    more = (
        f" The {len(shown)} of {len(rows)} layers with the fullest experts."
        if len(shown) < len(rows)
        else ""
    )
    return (
        f'<figure class="map"><figcaption>{title}<span class="plain">rows: layers, columns:'
        f" experts.{more}</span></figcaption>{scrolled(drawn, title)}</figure>"
    )
