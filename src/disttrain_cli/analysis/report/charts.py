"""Small charts of the report as SVG text: lines over steps, stacked shares, bars.

Every string is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Literal

from disttrain_cli.analysis.report.words import figure, seconds

Series = tuple[str, list[tuple[float, float]]]  # name, (step, value)


def line_chart(
    title: str,
    series: Sequence[Series],
    unit: str = "",
    expected: float | None = None,
    last: Literal["last", "mean"] = "last",
    log: bool = False,
) -> str:
    """Return lines over steps, at most 400 points each; empty text if there is nothing to draw.

    Args:
        title: caption.
        series: lines.
        unit: unit of the figures in the legend.
        expected: the plan's value, drawn as a dashed horizontal line.
        last: figure in the legend: the last value or the mean.
        log: logarithmic axis, if values are positive and span a factor of ten.
    """
    means = [sum(y for _, y in points) / len(points) for _, points in series if points]
    series = [(name, thin(points)) for name, points in series if points]
    if not series:
        return ""
    width, height, left, right, top, bottom = 460, 190, 52, 12, 14, 26
    xs = [x for _, points in series for x, _ in points]
    ys = [y for _, points in series for _, y in points] + ([] if expected is None else [expected])
    log = log and 0 < min(ys) <= max(ys) / 10
    scale = math.log10 if log else float
    ticks = log_ticks(min(ys), max(ys)) if log else round_ticks(min(0.0, *ys), max(ys))
    x0, x1 = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
    y0, y1 = scale(min(*ys, *ticks)), scale(max(*ys, *ticks))

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x0) / (x1 - x0) * (width - left - right),
            height - bottom - (scale(y) - y0) / (y1 - y0) * (height - top - bottom),
        )

    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(_summary(title, series, unit))}">'
    ]
    for value in ticks:
        y = at(x0, value)[1]
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/><text'
            f' class="axis" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>'
        )
    shown = [step for step in round_ticks(x0, x1) if x0 <= step <= x1 and step == int(step)]
    parts += [
        f'<text class="axis" x="{at(step, ticks[0])[0]:.1f}" y="{height - 8}"'
        f' text-anchor="{"start" if not index else "middle"}">'
        f"{'' if index else 'step '}{step:,.0f}</text>"
        for index, step in enumerate(shown)
    ]
    if expected is not None:
        y = at(x0, expected)[1]
        parts.append(
            f'<line class="expected" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    for index, (_, points) in enumerate(series):
        corners = [at(x, y) for x, y in points]
        parts.append(
            f'<polyline class="line s{index}"'
            f' points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}"/>'
        )
        if len(corners) == 1:
            parts.append(
                f'<circle class="dot s{index}" cx="{corners[0][0]:.1f}" cy="{corners[0][1]:.1f}"'
                ' r="3"/>'
            )
    parts.append("</svg>")
    legend = [
        f'<span><i class="s{index}"></i>{escape(name)} <b>'
        f"{figure(points[-1][1] if last == 'last' else means[index])}{escape(unit)}</b></span>"
        for index, (name, points) in enumerate(series)
    ]
    if expected is not None:
        legend.append(
            f'<span><i class="expected"></i>plan <b>{figure(expected)}{escape(unit)}</b></span>'
        )
    return (
        f"<figure><figcaption>{escape(title)}<div"
        f' class="legend">{"".join(legend)}</div></figcaption>'
        f"{''.join(parts)}</figure>"
    )


def _summary(title: str, series: Sequence[Series], unit: str) -> str:
    """Describe a chart in a sentence."""
    ends = [
        f"{name} from {figure(points[0][1])}{unit} to {figure(points[-1][1])}{unit}"
        for name, points in series
    ]
    return f"{title} over steps: {', '.join(ends)}"


def share_bar(shares: Sequence[tuple[str, str, float]]) -> str:
    """Return one stacked bar of (class, name, share) with a legend that names every part."""
    x, parts, legend = 0.0, [], []
    total = sum(max(0.0, share) for _, _, share in shares) or 1.0
    for kind, name, share in shares:
        size = 1000 * max(0.0, share) / total
        parts.append(
            f'<rect class="k-{escape(kind)}" x="{x:.2f}" y="0" width="{size:.2f}" height="34">'
            f"<title>{escape(name)}: {100 * share:.1f} %</title></rect>"
        )
        if size > 1.5:
            parts.append(
                f'<rect class="edge" x="{x + size - 1:.2f}" y="0" width="1.5" height="34"/>'
            )
        x += size
        legend.append(
            f'<span><i class="k-{escape(kind)}"></i>{escape(name)} <b>{100 * share:.1f}'
            " %</b></span>"
        )
    return (
        '<svg class="share" viewBox="0 0 1000 34" preserveAspectRatio="none" role="img" '
        f'aria-label="Shares of time; the legend has the figures">{"".join(parts)}</svg>'
        f'<div class="legend">{"".join(legend)}</div>'
    )


def waterfall(parts: Sequence[tuple[str, str, float]], label: str) -> str:
    """Return bars of (class, name, seconds), each beginning at the end of the one before.

    Bars of class total begin at 0.
    """
    reach, at = 1e-12, 0.0
    for kind, _, value in parts:
        at = value if kind == "total" else at + value
        reach = max(reach, at)
    at, drawn = 0.0, []
    for kind, name, value in parts:
        start, end = (0.0, value) if kind == "total" else (at, at + value)
        low, high = max(0.0, min(start, end)), max(start, end)
        text = seconds(abs(value))
        sign = "" if kind == "total" or text == "0" else "−" if value < 0 else "+"
        drawn.append(
            (
                name,
                sign + text,
                [(kind if text != "0" else "nothing", low / reach, (high - low) / reach)],
            )
        )
        at = end
    return _bars(drawn, label)


def stacked_rows(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], label: str) -> str:
    """Return one stacked bar per row of (name, parts of (class, value)), all on one scale."""
    reach = max((sum(value for _, value in parts) for _, parts in rows), default=0.0) or 1.0
    drawn = []
    for name, parts in rows:
        at, bars = 0.0, list[tuple[str, float, float]]()
        for kind, value in parts:
            bars.append((f"k-{kind}", at, max(0.0, value) / reach))
            at += bars[-1][2]
        drawn.append((name, "", bars))
    return _bars(drawn, label, " dense" if len(rows) > 24 else "")


def _bars(
    rows: Sequence[tuple[str, str, Sequence[tuple[str, float, float]]]], label: str, more: str = ""
) -> str:
    """Return rows of (name, figure, bars of (class, offset, length)).

    Offset and length are shares of the full width. Names and figures are text of the page; only the
    bars stretch with it, so that a phone shows all of them.
    """
    drawn = []
    for name, value, bars in rows:
        rects = "".join(
            f'<rect class="{escape(kind)}" x="{1000 * at:.2f}" y="0" width="{1000 * size:.2f}" '
            'height="10"/>'
            for kind, at, size in bars
        )
        drawn.append(
            f'<span>{escape(name)}</span><span class="soft">{value}</span><svg viewBox="0 0 1000'
            f' 10" preserveAspectRatio="none" aria-hidden="true">{rects}</svg>'
        )
    return (
        f'<div class="bars{more}" role="group" aria-label="{escape(label)}">{"".join(drawn)}</div>'
    )


def _tick(value: float) -> str:
    """Format a round number without superfluous digits."""
    return figure(value) if value == 0 or abs(value) >= 1e-3 else f"{value:g}"


def round_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten that enclose a range."""
    high = high if high > low else low + 1
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    each = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / each + 1e-9), math.ceil(high / each - 1e-9)
    return [float(f"{number * each:.12g}") for number in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return powers of ten that enclose a range, and their multiples of 2 and 5 if they are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, -(-(last - first) // most))
    factors = (1, 2, 5) if last - first < 3 else (1,)
    ticks = [
        factor * 10.0**power for power in range(first, last + every, every) for factor in factors
    ]
    begin = max((one for one in ticks if one <= low), default=ticks[0])
    end = min((one for one in ticks if one >= high), default=ticks[-1])
    return [float(f"{one:.12g}") for one in ticks if begin <= one <= end]


def thin(points: list[tuple[float, float]], most: int = 400) -> list[tuple[float, float]]:
    """Return every k-th point and the last one, so that a page does not grow with the steps."""
    every = -(-len(points) // most)
    return points if every <= 1 else [*points[:-1:every], points[-1]]
