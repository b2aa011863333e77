"""Tables and small pictures of the report, from an `Analysis` to escaped HTML text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from disttrain_cli.analysis.result import Analysis, Comparison, JobSummary, Stragglers

_CAUSES = {
    "unit": "GPUs badly shared between units",
    "intra_microbatch": "uneven data over replicas",
    "inter_microbatch": "uneven data over slots",
    "stage": "uneven stages",
    "worker": "slow ranks",
    "communication": "transfers",
    "data": "waiting for data",
    "host": "hosts",
    "unexplained": "unexplained",
}
_FIGURES = {
    "iteration_s": "step time",
    "sequences_per_s": "sequences per second",
    "mfu": "MFU",
    "bubble_fraction": "bubble",
    "stage_ms": "slowest stage per slot",
}
#: Rows and columns of a picture or table; what is beyond is left out and said.
MOST_RANKS, MOST_CELLS, MOST_OPERATIONS = 256, 32, 40


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; heads and cells must be escaped already."""
    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def seconds(value: float) -> str:
    if abs(value) < 1e-6:
        return "0"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def tiles(job: JobSummary) -> str:
    """The job's figures, large."""
    values = [
        (seconds(job.iteration_s), "mean step"),
        (percent(job.mfu), "MFU"),
        (percent(job.bubble_fraction), "bubble"),
        (percent(job.exposed_communication_fraction), "exposed communication"),
        ("–" if job.sequences_per_s is None else f"{job.sequences_per_s:.3g}", "sequences per second"),
        (f"{job.ranks}", f"ranks · {job.steps_measured} steps measured"),
    ]
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for value, name in values)
        + "</div>"
    )


def units_table(analysis: Analysis) -> str:
    """One row per unit."""
    rows = [
        [
            escape(unit.name),
            f"{unit.tp} · {unit.dp} · {unit.pp}",
            str(unit.gpus),
            percent(unit.mfu),
            percent(unit.busy_fraction),
            seconds(unit.compute_s),
            seconds(unit.other_unit_s),
            seconds(unit.data_wait_s),
        ]
        for unit in analysis.units
    ]
    return (
        '<section><h2>Units</h2><p class="note">Times per rank and step. On a CPU a unit’s '
        'share of the peak is its share of '
        "the ranks.</p>"
        + table(["Unit", "TP · DP · PP", "GPUs", "MFU", "Busy", "Compute", "Waits for unit", "for data"], rows)
        + "</section>"
    )


def lost_bars(stragglers: Stragglers) -> str:
    """Lost seconds by cause as horizontal bars."""
    if stragglers.lost_s is None or stragglers.slowdown is None:
        return (
            '<section><h2>What a step loses</h2><p class="note">No recorded step was whole enough '
            'to be replayed.</p></section>'
        )
    largest = max(1e-9, *(abs(value) for value in stragglers.lost_s.values()))
    parts = []
    for index, (cause, value) in enumerate(stragglers.lost_s.items()):
        y, size = 24 * index, 150 * abs(value) / largest
        parts.append(
            f'<text x="0" y="{y + 15}">{escape(_CAUSES.get(cause, cause))}</text>'
            f'<rect class="{"lost" if value > 0 else "gain"}" x="232" y="{y + 4}" '
            f'width="{max(size, 1):.1f}" height="14" rx="2"/>'
            f'<text class="soft" x="{240 + size:.1f}" '
            f'y="{y + 15}">{"−" if value < -5e-5 else ""}{seconds(abs(value))}</text>'
        )
    return (
        '<section><h2>What a step loses</h2><p class="note">Slowdown '
        f'{stragglers.slowdown:.2f} against the ideal step of '
        f"{seconds(stragglers.ideal_s or 0.0)} (work of each unit even, GPUs perfectly shared, "
        "no delays); replayed with one "
        f'cause after another.</p><svg class="bars" viewBox="0 0 460 {24 * len(parts)}" '
        'role="img" aria-label="Lost seconds by cause">'
        f"{''.join(parts)}</svg></section>"
    )


def predicted_table(rows: Sequence[Comparison]) -> str:
    """Predictions beside measurements, one line per figure; errors beyond 10 and 25 % are marked."""

    def figure(value: float, measure: str) -> str:
        return percent(value) if measure == "fraction" else f"{value:.4g} {escape(measure)}"

    def both(row: Comparison | None) -> list[str]:
        return ["–", ""] if row is None else [figure(row.predicted, row.measure), _error(row.error_pct)]

    cells = []
    for unit, what in dict.fromkeys((row.unit, row.what) for row in rows):
        of = {row.basis: row for row in rows if (row.unit, row.what) == (unit, what)}
        measured = next(iter(of.values()))
        cells.append(
            [
                f"{escape(unit or 'job')}: {escape(_FIGURES.get(what, what))}",
                f"<b>{figure(measured.measured, measured.measure)}</b>",
                *both(of.get("plan")),
                *both(of.get("same work")),
            ]
        )
    return (
        '<section id="predicted"><h2>Predicted against measured</h2><p class="note">The plan '
        'expects mean data; the profile, '
        "asked for the very sizes that were recorded, shows how much of the error is its own.</p>"
        + table(["Figure", "Measured", "Plan", "off by", "Profile, same work", "off by"], cells)
        + "</section>"
    )


def operations_table(analysis: Analysis) -> str:
    """Where prediction and measurement part, operation by operation; the largest effect on a step first."""
    rows = [
        [escape(row.place), escape(row.operation), "–" if row.planned is None else f"{row.planned:.4g}",
         f"{row.predicted:.4g}", f"<b>{row.measured:.4g}</b>", _error(row.error_pct), f"{row.per_step:.3g}",
         f"{row.effect_ms:+.3f}", percent(row.share_of_step)]
        for row in analysis.operations[1:1 + MOST_OPERATIONS]
    ]
    more = max(0, len(analysis.operations) - 1 - len(rows))
    note = f" {more} operations with smaller ones are left out." if more else ""
    return (
        '<section id="operations"><h2>Prediction and measurement by operation</h2><p class="note">ms, without '
        f"waiting for other ranks; the largest error in a step first. Transfers are named by the stage before the cut."
        f"{note}</p>"
        + table(["Where", "Operation", "Plan", "Profile, same work", "Measured", "off by", "Per step", "adds",
                 "Of the step"], rows)
        + "</section>"
    )


def _error(error_pct: float | None) -> str:
    """An error in percent, marked beyond 10 and 25."""
    if error_pct is None:
        return "–"
    kind = "far" if abs(error_pct) > 25 else "off" if abs(error_pct) > 10 else ""
    return f'<span class="{kind}">{error_pct:+.1f} %</span>'


def ranks_table(analysis: Analysis) -> str:
    """Time of every rank, folded."""
    rows = [
        [
            str(rank.rank),
            escape(f"{rank.unit} · {rank.stage} · {rank.replica}"),
            escape(rank.host),
            *(
                f"{value / 1e3:,.1f}"
                for value in (
                    rank.span_us,
                    rank.compute_us,
                    rank.non_compute_us,
                    rank.idle_us,
                    rank.collective_wait_us,
                )
            ),
            f"{rank.overlap_pct:.1f}",
        ]
        for rank in analysis.ranks[:MOST_RANKS]
    ]
    more = f" The first {MOST_RANKS} of {len(analysis.ranks)}." if len(analysis.ranks) > MOST_RANKS else ""
    return (
        f'<section><details><summary>Ranks ({len(analysis.ranks)})</summary><p class="note">ms '
        'over the measured steps; '
        f"waiting for data is idle.{more}</p>"
        + table(
            [
                "Rank",
                "Unit · stage · replica",
                "Host",
                "Span",
                "Compute",
                "Non-compute",
                "Idle",
                "Wait in collectives",
                "Overlap %",
            ],
            rows,
        )
        + "</details></section>"
    )


def heat_map(cells: Sequence[dict[str, Any]]) -> str:
    """Stage (rows, through the pipeline) × replica (columns), coloured by the ratio to the unit's mean."""
    stages = sorted({(cell["depth"], cell["unit"], cell["stage"]) for cell in cells})[:MOST_CELLS]
    columns = min(MOST_CELLS, 1 + max((cell["replica"] for cell in cells), default=0))
    width, height = max(16, min(64, 340 // columns)), 30
    left = 24 + 7 * max((len(unit[:20]) for _, unit, _ in stages), default=0)
    parts = [
        f'<text class="axis" x="{left + width * column + width / 2:.0f}" y="12" text-anchor="middle">{column}</text>'
        for column in range(columns)
    ]
    found = {(cell["depth"], cell["replica"]): cell for cell in cells}
    for row, (depth, unit, stage) in enumerate(stages):
        y = 20 + row * height
        parts.append(f'<text x="0" y="{y + 19}">{escape(str(unit)[:20])} · {stage}</text>')
        for column in range(columns):
            cell = found.get((depth, column))
            if cell is None:
                continue
            away = (cell["ratio"] or 1.0) - 1.0
            label = (
                f'<text x="{left + column * width + width / 2:.0f}" y="{y + 19}" '
                f'text-anchor="middle">{cell["mean_ms"]:.3g}</text>'
                if width >= 34
                else ""
            )
            parts.append(
                f'<rect class="{"cool" if away < 0 else "hot"}" x="{left + column * width}" y="{y}" '
                f'width="{width - 2}" '
                f'height="{height - 2}" rx="3" fill-opacity="{min(0.85, 0.06 + 1.6 * abs(away)):.2f}"><title>'
                f"{escape(str(unit))} stage {stage} replica {column}: {cell['mean_ms']:.3g} ms, "
                f"{1 + away:.2f} × mean</title>"
                f"</rect>{label}"
            )
    w, h = left + width * columns, 24 + height * len(stages)
    return (
        f'<svg class="heat" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" '
        f'aria-label="Compute per slot by stage and replica">{"".join(parts)}</svg>'
    )
