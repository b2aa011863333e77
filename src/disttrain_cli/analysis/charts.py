"""Small pictures of the report as SVG text: lines over steps and shares of time. Every string is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Series = tuple[str, list[tuple[float, float]]]  # name, (step, value)


def line_chart(title: str, series: Sequence[Series], unit: str = "") -> str:
    """Lines over steps, at most 400 points each; empty text where there is nothing to draw."""
    series = [(name, thin(points)) for name, points in series if points]
    if not series:
        return ""
    width, height, left, right, top, bottom = 460, 190, 52, 12, 14, 26
    xs = [x for _, points in series for x, _ in points]
    ys = [y for _, points in series for _, y in points]
    x0, x1, y0, y1 = min(xs), max(xs), min(0.0, *ys), max(ys)
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 if y1 > y0 else y0 + 1)

    def at(x: float, y: float) -> str:
        return (
            f"{left + (x - x0) / (x1 - x0) * (width - left - right):.1f},"
            f"{height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom):.1f}"
        )

    parts = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
    for index in range(4):
        value = y0 + (y1 - y0) * index / 3
        y = at(x0, value).split(",")[1]
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y}" y2="{y}"/>'
            f'<text class="axis" x="{left - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    parts.append(
        f'<text class="axis" x="{left}" y="{height - 8}">step {x0:.0f}</text>'
        f'<text class="axis" x="{width - right}" y="{height - 8}" text-anchor="end">{x1:.0f}</text>'
    )
    for index, (_, points) in enumerate(series):
        path = " ".join(at(x, y) for x, y in points)
        parts.append(f'<polyline class="line s{index}" points="{path}"/>')
        if len(points) == 1:
            x, y = path.split(",")
            parts.append(f'<circle class="dot s{index}" cx="{x}" cy="{y}" r="3"/>')
    parts.append("</svg>")
    legend = "".join(
        f'<span><i class="s{index}"></i>{escape(name)} <b>{points[-1][1]:.3g}{escape(unit)}</b></span>'
        for index, (name, points) in enumerate(series)
    )
    return (
        f'<figure><figcaption>{escape(title)}<div '
        f'class="legend">{legend}</div></figcaption>{"".join(parts)}</figure>'
    )


def share_bar(shares: Sequence[tuple[str, str, float]]) -> str:
    """One stacked bar of (class, name, share) with a legend."""
    x, parts, legend = 0.0, [], []
    total = sum(max(0.0, share) for _, _, share in shares) or 1.0
    for kind, name, share in shares:
        size = 1000 * max(0.0, share) / total
        parts.append(
            f'<rect class="k-{escape(kind)}" x="{x:.2f}" y="0" width="{size:.2f}" height="34">'
            f"<title>{escape(name)}: {100 * share:.1f} %</title></rect>"
        )
        x += size
        legend.append(f'<span><i class="k-{escape(kind)}"></i>{escape(name)} <b>{100 * share:.1f} %</b></span>')
    return (
        f'<svg class="share" viewBox="0 0 1000 34" preserveAspectRatio="none" role="img" aria-label="Shares of time">'
        f'{"".join(parts)}</svg><div class="legend">{"".join(legend)}</div>'
    )


def thin(points: list[tuple[float, float]], most: int = 400) -> list[tuple[float, float]]:
    """Every k-th point, the last one kept, so that a page does not grow with the steps."""
    every = -(-len(points) // most)
    return points if every <= 1 else [*points[:-1:every], points[-1]]
