"""Heatmap of stage × replica: mean time of a slot, and the same over its predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from disttrain_cli.analysis.report.words import figure, folded, grid, percent, scrolled

#: Rows and columns drawn; of more replicas, those furthest from the mean.
MOST_STAGES, MOST_REPLICAS = 48, 64
_STRIPES = (
    '<defs><pattern id="{name}" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="stripe" width="1.6" height="5"/></pattern></defs>'
)


def heat_maps(cells: Sequence[dict[str, Any]]) -> str:
    """Return both maps and their figures as a table; empty text if there are no cells."""
    if not cells:
        return ""
    drawn = _map("time", cells, "ratio", "Compute of a slot in ms, relative to the unit’s mean")
    if any(cell["normalised"] is not None for cell in cells):
        drawn += _map(
            "work", cells, "normalised", "The same, relative to the time that its work should take"
        )
    figures = grid(
        _chosen(cells),
        [
            ("Stage", lambda cell: escape(f"{cell['unit']} · stage {cell['stage']}")),
            ("Replica", lambda cell: str(cell["replica"])),
            ("Compute of a slot", lambda cell: f"{figure(cell['mean_ms'])} ms"),
            ("÷ mean", lambda cell: percent(cell["ratio"])),
            ("÷ mean, same work", lambda cell: percent(cell["normalised"])),
        ],
    )
    return drawn + folded("As a table", figures)


def _chosen(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells that are drawn."""
    depths = sorted({cell["depth"] for cell in cells})[:MOST_STAGES]
    furthest: dict[int, float] = {}
    for cell in cells:
        away = max(abs((cell[key] or 1.0) - 1.0) for key in ("ratio", "normalised"))
        furthest[cell["replica"]] = max(away, furthest.get(cell["replica"], 0.0))
    replicas = sorted(furthest, key=lambda replica: (-furthest[replica], replica))[:MOST_REPLICAS]
    return [cell for cell in cells if cell["depth"] in depths and cell["replica"] in replicas]


def _map(name: str, cells: Sequence[dict[str, Any]], key: str, title: str) -> str:
    """Draw stages (rows, through the pipeline) × replicas (columns), coloured by ratio to the mean.

    The mean is the unit's. Slower is full, faster is striped, so that they differ in greyscale.
    """
    shown = _chosen(cells)
    stages = sorted({(cell["depth"], str(cell["unit"])[:20], cell["stage"]) for cell in shown})
    replicas = sorted({cell["replica"] for cell in shown})
    left = 24 + 7 * max(len(unit) + len(str(stage)) for _, unit, stage in stages)
    width, height = max(11, min(72, (1040 - left) // len(replicas))), 30
    every = max(1, -(-22 // width))
    columns = {replica: left + width * index for index, replica in enumerate(replicas)}
    parts = [
        f'<text class="axis" x="{x + width / 2:.0f}" y="12" text-anchor="middle">{replica}</text>'
        for index, (replica, x) in enumerate(columns.items())
        if index % every == 0
    ]
    rows = {depth: 20 + height * index for index, (depth, _, _) in enumerate(stages)}
    parts += [
        f'<text x="0" y="{rows[depth] + 19}">{escape(unit)} · {stage}</text>'
        for depth, unit, stage in stages
    ]
    texts = {
        (cell["depth"], cell["replica"]): (
            figure(cell["mean_ms"]) if key == "ratio" else f"{cell[key]:.2f}"
        )
        for cell in shown
        if cell[key] is not None
    }
    longest = max((len(text) for text in texts.values()), default=0)
    unit = " ms" if key == "ratio" else " ×"
    if 7.5 * (longest + len(unit)) <= width:
        texts = {cell: text + unit for cell, text in texts.items()}
        longest += len(unit)
    small, labelled = 7.5 * longest > width, 5.8 * longest <= width
    for cell in shown:
        if cell[key] is None:
            continue
        x, y, away = columns[cell["replica"]], rows[cell["depth"]], cell[key] - 1.0
        strength = min(0.9, 0.05 + 1.6 * abs(away))
        fill = (
            f'<rect class="{"hot" if away >= 0 else "cool"}" x="{x}" y="{y}" width="{width - 2}" '
            f'height="{height - 2}" rx="2" fill-opacity="{strength:.2f}"><title>'
            f"{escape(str(cell['unit']))} stage {cell['stage']} replica {cell['replica']}: "
            f"{figure(cell['mean_ms'])} ms, {percent(cell[key])} of the mean</title></rect>"
        )
        stripes = (
            f'<rect fill="url(#{name})" x="{x}" y="{y}" width="{width - 2}" height="{height - 2}"'
            ' rx="2" class="over"/>'
            if away < -0.02
            else ""
        )
        label = (
            f'<text{" class=small" if small else ""} x="{x + width / 2 - 1:.0f}" y="{y + 19}" '
            f'text-anchor="middle">{texts[cell["depth"], cell["replica"]]}</text>'
            if labelled
            else ""
        )
        parts.append(fill + stripes + label)
    w, h = left + width * len(replicas), 24 + height * len(stages)
    count = len({cell["replica"] for cell in cells})
    more = (
        f" The {len(replicas)} of {count} replicas furthest from the mean."
        if count > len(replicas)
        else ""
    )
    drawn = (
        f'<svg class="heat" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img"'
        f' aria-label="{title}, by stage and'
        f' replica">{_STRIPES.format(name=name)}{"".join(parts)}</svg>'
    )
    return (
        f'<figure class="map"><figcaption>{title}<span class="plain">rows: stages, columns:'
        f" replicas.{more}</span></figcaption>{scrolled(drawn, title)}</figure>"
    )
