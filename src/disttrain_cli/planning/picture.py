"""Timelines of a predicted step: an SVG for a browser, and lines of letters for a terminal.

Rows are stages in pipeline order, each shown by its busiest replica; gaps are idle time. A step of
many slots is drawn as its first, a middle and its last stretch, all on one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.simulation.timeline import Pipeline, Timeline
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.whole import is_own_file, write_whole

Floats = NDArray[np.float64]
MOST_ROWS = 24
MOST_BARS = 4800  # operations drawn; beyond that only stretches of the step
WIDTH, ROW, GAP, TOP, LEFT = 1200, 18, 8, 62, 190  # px
KINDS = (
    ("f", "forward"),
    ("b", "backward"),
    ("g", "gradients of weights"),
    ("r", "gradient reduction"),
    ("o", "optimizer"),
    ("w", "waiting"),
)
STYLE = """<style>
text{font:12px system-ui,sans-serif;fill:#24292f}.page{fill:#fff}
.w{fill:#e4e8ec}.f{fill:#2f81d8}.b{fill:#e0882e}.g{fill:#bf5a8e}
.r{fill:#8250df}.o{fill:#1a7f5a}.line{stroke:#8c959f;stroke-width:1}.dim{fill:#57606a}.head{font-weight:600}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}
.page{fill:#0d1117}.w{fill:#262c34}.f{fill:#58a6ff}
.b{fill:#f0a04b}.g{fill:#d97fae}.r{fill:#a98cf0}.o{fill:#3fb98a}.dim{fill:#9198a1}}
</style>"""
LETTERS = {"f": "F", "b": "B", "g": "W", "r": "R", "o": "R"}


@dataclass(frozen=True)
class Row:
    """One stage: its busiest replica's operations in order of time."""

    label: str
    unit: str
    forward: Floats  # [n, 2] start and end in s
    backward: Floats  # [n, 2]
    weights: Floats  # [n, 2] deferred weight gradients; without any [0, 2]
    reduction: Floats  # [1, 2] after the last pass
    # [1, 2] after every stage's reduction; with overlapped gathering of weights its exposed part
    # before the first forward
    optimizer: Floats

    def bars(self) -> list[tuple[str, Floats]]:
        """Return (kind, [k, 2] starts and ends) of all operations of the stage."""
        return [
            ("f", self.forward),
            ("b", self.backward),
            ("g", self.weights),
            ("r", self.reduction),
            ("o", self.optimizer),
        ]


def rows_of(
    pipeline: Pipeline, timeline: Timeline, layout: Layout, most: int = MOST_ROWS
) -> list[Row]:
    """Return at most `most` stages: every unit's first and last, the others evenly spaced.

    Never fewer than one per unit.
    """
    shown = _shares([unit.stages for unit in layout.units], most)
    busy = np.nan_to_num(timeline.busy_s, nan=-1.0)
    exposed_s, lead_s = pipeline.exposed_s, pipeline.lead_s
    updates_at = timeline.iteration_s - pipeline.closing_s
    rows: list[Row] = []
    first = 0
    for unit, count in zip(layout.units, shown, strict=True):
        for index in np.unique(np.linspace(0, unit.stages - 1, count).round().astype(int)):
            stage = first + int(index)
            replica = int(busy[stage].argmax())
            which = f" {index + 1}/{unit.stages}" if unit.stages > 1 else ""
            copies = f" ×{unit.dp}" if unit.dp > 1 else ""
            index_of = (slice(None), stage, replica)
            passes = [(timeline.backward_start, timeline.backward_end)]
            if timeline.weight_start is not None and timeline.weight_end is not None:
                passes.append((timeline.weight_start, timeline.weight_end))
            backward, *weights = (
                np.stack([start[index_of], end[index_of]], axis=1) for start, end in passes
            )
            done = float(max(spans[:, 1].max() for spans in (backward, *weights)))
            rows.append(
                Row(
                    f"{unit.name}{which}{copies}",
                    unit.name,
                    np.stack(
                        [timeline.forward_start[index_of], timeline.forward_end[index_of]], axis=1
                    ),
                    backward,
                    weights[0] if weights else np.empty((0, 2)),
                    np.array([[done, done + float(exposed_s[stage, replica])]]),
                    np.array(
                        [[updates_at, timeline.iteration_s]]
                        if pipeline.gathering is None
                        else [[0.0, float(lead_s[stage, replica])]]
                    ),
                )
            )
        first += unit.stages
    return rows


def _shares(stages: list[int], most: int) -> list[int]:
    """Return the rows of every unit: all its stages if they fit, else in proportion.

    Units with two or more stages have at least two.
    """
    if sum(stages) <= most:
        return stages
    return [min(count, max(2, most * count // sum(stages))) for count in stages]


def stretches(rows: Sequence[Row], iteration_s: float, most_bars: int) -> list[tuple[float, float]]:
    """Return the drawn parts of the step as (start, end) in s: all, or first, middle and last."""
    count = sum(len(row.forward) + len(row.backward) + len(row.weights) for row in rows)
    if count <= most_bars:
        return [(0.0, iteration_s)]
    part = iteration_s * most_bars / count / 3
    middle = iteration_s / 2
    return [(0.0, part), (middle - part / 2, middle + part / 2), (iteration_s - part, iteration_s)]


def draw(path: Path, pipeline: Pipeline, timeline: Timeline, layout: Layout) -> Path | None:
    """Write the SVG of a plan's step next to the plan's file; None if that is a pipe or device."""
    if not is_own_file(path):
        return None
    return write_whole(
        path.with_name(f"{path.name.removesuffix('.yaml')}.svg"), svg(pipeline, timeline, layout)
    )


def svg(pipeline: Pipeline, timeline: Timeline, layout: Layout) -> str:
    """Return the predicted step as an SVG document, without scripts or external resources."""
    rows = rows_of(pipeline, timeline, layout)
    panels = stretches(rows, timeline.iteration_s, MOST_BARS)
    space = 24.0  # px between stretches
    width = (WIDTH - LEFT - 20 - space * (len(panels) - 1)) / len(panels)
    scale = width / max(1e-12, panels[0][1] - panels[0][0])  # px per s
    tops = _tops(rows)
    height = tops[-1] + ROW + 46
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
            f' aria-label="Predicted timeline of one step">{STYLE}<rect class="page"'
            f' width="{WIDTH}" height="{height}"/>'
        ),
        *_heading(layout, timeline),
    ]
    for row, top in zip(rows, tops, strict=True):
        parts.append(
            f'<text x="{LEFT - 10}" y="{top + 13}" text-anchor="end">{escape(row.label)}</text>'
        )
    for number, (start, end) in enumerate(panels):
        x = LEFT + number * (width + space)
        for row, top in zip(rows, tops, strict=True):
            parts.append(f'<path class="w" d="M{x:.1f} {top}h{width:.1f}v{ROW}h-{width:.1f}z"/>')
            parts += [_path(kind, spans, start, end, x, top, scale) for kind, spans in row.bars()]
        parts += _axis(start, end, x, scale, tops[-1] + ROW + 4)
    if len(panels) > 1:
        share = sum(end - start for start, end in panels) / timeline.iteration_s
        parts.append(
            f'<text class="dim" x="{LEFT}" y="{height - 8}">Drawn: the beginning, the middle and'
            f" the end, {100 * share:.2g} % of the step.</text>"
        )
    return "".join(part for part in parts if part) + "</svg>\n"


def _tops(rows: Sequence[Row]) -> list[int]:
    """Return the upper edge of every row in px, with a gap between units."""
    tops, top = [], TOP
    for number, row in enumerate(rows):
        if number and row.unit != rows[number - 1].unit:
            top += GAP
        tops.append(top)
        top += ROW + 2
    return tops


def _heading(layout: Layout, timeline: Timeline) -> list[str]:
    words = (
        f"Predicted step: {seconds(timeline.iteration_s)}, {layout.microbatches:,} slots,"
        f" {layout.gpus_used:,} GPUs"
    )
    parts = [f'<text class="head" x="{LEFT}" y="20">{escape(words)}</text>']
    x = LEFT
    for kind, name in KINDS:
        if kind == "g" and timeline.weight_start is None:
            continue
        parts.append(
            f'<path class="{kind}" d="M{x} 32h12v12h-12z"/><text x="{x + 17}" y="42">{name}</text>'
        )
        x += 40 + 7 * len(name)
    return parts


def _path(
    kind: str, spans: Floats, start: float, end: float, x: float, top: int, scale: float
) -> str:
    """Return all bars of one kind in one row as one path; empty if there are none."""
    within = spans[(spans[:, 1] > start) & (spans[:, 0] < end) & (spans[:, 1] > spans[:, 0])]
    bars = []
    for left, right in (np.clip(within, start, end) - start) * scale:
        bars.append(f"M{x + left:.1f} {top}h{right - left:.2f}v{ROW}h-{right - left:.2f}z")
    return f'<path class="{kind}" d="{"".join(bars)}"/>' if bars else ""


def _axis(start: float, end: float, x: float, scale: float, y: int) -> list[str]:
    """Return a line with round times under it."""
    step = _round_step((end - start) / max(1.0, (end - start) * scale / 80))
    parts = [f'<path class="line" d="M{x:.1f} {y}h{(end - start) * scale:.1f}"/>']
    for index in range(int(np.ceil(start / step - 1e-9)), int(np.floor(end / step + 1e-9)) + 1):
        tick = index * step
        at = x + (tick - start) * scale
        parts.append(
            f'<path class="line" d="M{at:.1f} {y}v4"/><text class="dim" x="{at:.1f}" y="{y + 17}"'
            f' text-anchor="middle">{seconds(tick, step)}</text>'
        )
    return parts


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5 × 10^k that is no less than `least`."""
    power = 10.0 ** np.floor(np.log10(max(least, 1e-9)))
    return float(
        next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
    )


def seconds(value: float, step: float | None = None) -> str:
    """Format a time with its unit: ms below a second.

    With `step`, as many digits as distinguish neighbouring ticks.
    """
    unit, factor = ("s", 1.0) if (step or value) >= (0.1 if step else 1.0) else ("ms", 1e3)
    if step is None:
        return (
            f"{value * factor:.3g} {unit}"
            if value * factor < 1000
            else f"{value * factor:.0f} {unit}"
        )
    return f"{value * factor:.{max(0, -int(np.floor(np.log10(step * factor) + 1e-9)))}f} {unit}"


def gantt(
    pipeline: Pipeline, timeline: Timeline, layout: Layout, columns: int, most_rows: int = 8
) -> list[str]:
    """Return lines of letters for a terminal: F, B, W, R, dots for waiting.

    F is a forward, B a backward, W deferred weight gradients, R reduction and optimizer. Each
    letter is the stage's main activity in its interval. A step of too many slots is shown by its
    beginning and its end.
    """
    rows = rows_of(pipeline, timeline, layout, most_rows)
    name = max(len(row.label) for row in rows)
    room = max(24, columns - name - 2)
    whole = timeline.iteration_s
    half = (room - 5) // 2
    warmup = float(np.nanmax(timeline.backward_end[0]))
    # about three letters per operation
    part = max(1.5 * warmup, whole * half / (6 * layout.microbatches))
    panels = (
        [(0.0, whole, room)]
        if part >= whole / 2
        else [(0.0, part, half), (whole - part, whole, half)]
    )
    return [
        f"{row.label:<{name}}  " + " ... ".join(_letters(row, *panel) for panel in panels)
        for row in rows
    ] + [" " * (name + 2) + " ... ".join(_scale_line(*panel) for panel in panels)]


def _letters(row: Row, start: float, end: float, cells: int) -> str:
    edges = np.linspace(start, end, cells + 1)
    shares = {".": np.full(cells, 0.5 * (end - start) / cells)}
    for kind, spans in row.bars():
        covered = np.zeros(cells + 1)
        for left, right in spans[(spans[:, 1] > start) & (spans[:, 0] < end)]:
            covered += np.clip(edges, left, right) - left
        letter = LETTERS[kind]
        shares[letter] = shares.get(letter, 0.0) + np.diff(covered)
    letters = list(shares)
    return "".join(letters[index] for index in np.stack(list(shares.values())).argmax(axis=0))


def _scale_line(start: float, end: float, cells: int) -> str:
    first, last = seconds(start) if start else "0", seconds(end)
    return first + " " * max(1, cells - len(first) - len(last)) + last
