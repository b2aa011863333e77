"""Tables of predictions, measurements and remedies; empty text if an `Analysis` has none."""

from __future__ import annotations

from html import escape

from disttrain_cli.analysis.figures import agree, counted
from disttrain_cli.analysis.report.words import (
    figure,
    folded,
    percent,
    seconds,
    section,
    table,
)
from disttrain_cli.analysis.result.rows import GROWN, Comparison, OperationRow
from disttrain_cli.analysis.result.summary import Analysis

#: Most rows; the page states how many more are left out.
MOST_OPERATIONS, MOST_ROWS, MOST_GROUPS = 120, 24, 12
SHOWN = 10  # operations that are not folded
_FIGURES = {
    "iteration_s": "step time",
    "sequences_per_s": "sequences per second",
    "mfu": "MFU",
    "stage_ms": "slowest stage per slot",
}


def remedies(analysis: Analysis) -> str:
    """Show savings of single changes."""
    rows = [
        [
            escape(row.change),
            f"{row.gpus:+d}" if row.gpus else "same",
            seconds(row.step_s),
            seconds(row.gain_s),
            percent(row.gain_pct / 100),
            f"<code>{escape(row.command)}</code>",
        ]
        for row in analysis.remedies
        if row.worth
    ]
    return (
        section(
            "What would help",
            "One change at a time, everything else as recorded, so savings do not add up."
            " Estimated by replaying the recorded steps, or, for a new plan, by the planner with"
            " this run’s times.",
            table(
                ["Change", "Devices", "Step", "Saved", "Share of step", "Next command"],
                rows,
                label="What would help",
            ),
            "remedies",
        )
        if rows
        else ""
    )


def what_if(analysis: Analysis) -> str:
    """Show the published study's slowdowns."""
    search = analysis.what_if
    if search is None:
        return ""
    rows: list[list[str]] = []
    for kind, group in (
        ("stage", search.by_stage),
        ("replica", search.by_replica),
        ("operation", search.by_operation),
    ):
        worst = sorted(group.items(), key=lambda item: -item[1])[:MOST_GROUPS]
        rows += [
            [f"{kind} {escape(name.replace('_', ' '))}", f"{value:.4f}"] for name, value in worst
        ]
    shares = [
        (
            f"The slowest 3 % of the workers explain {percent(search.worst_workers_share)} of the"
            " loss"
            if search.worst_workers_share is not None
            else ""
        ),
        (
            f"the last stage {percent(search.last_stage_share)}"
            if search.last_stage_share is not None
            else ""
        ),
    ]
    sentence = ", ".join(part for part in shares if part)
    return section(
        "What if",
        "As defined by the study “Understanding Stragglers in Large Model Training Using"
        f" What-if Analysis”, with ideals over all stages: S = <b>{search.slowdown:.4f}</b>."
        f" {sentence}{'.' if sentence else ''} Below: the slowdown with only one of them as"
        f" recorded; at most {MOST_GROUPS} per kind.",
        folded(
            f"By stage, replica and operation ({len(rows)})",
            table(["As recorded", "Slowdown"], rows, narrow=True),
        ),
        "what-if",
    )


def predicted(analysis: Analysis) -> str:
    """Show predictions and measurements, one line per figure; errors beyond 10 and 25 % marked."""
    rows = [
        row for row in analysis.predicted_vs_measured if row.unit is None or row.what == "stage_ms"
    ]
    if not rows:
        return ""

    def shown(value: float, measure: str) -> str:
        return percent(value) if measure == "fraction" else f"{figure(value, 4)} {escape(measure)}"

    def both(row: Comparison | None) -> list[str]:
        return (
            ["–", ""] if row is None else [shown(row.predicted, row.measure), _error(row.error_pct)]
        )

    names = _FIGURES | {"bubble_fraction": analysis.not_computing}
    cells = []
    for unit, what in dict.fromkeys((row.unit, row.what) for row in rows):
        of = {row.basis: row for row in rows if (row.unit, row.what) == (unit, what)}
        measured = next(iter(of.values()))
        cells.append(
            [
                f"{escape(unit or 'job')}: {escape(names.get(what, what))}",
                f"<b>{shown(measured.measured, measured.measure)}</b>",
                *both(of.get("plan")),
                *both(of.get("same work")),
            ]
        )
    return section(
        "Predicted against measured",
        "The plan predicts mean data; the prediction for the recorded sizes shows how much of the"
        " error is due to the profile.",
        table(
            ["Figure", "Measured", "Plan", "Error", "Profile, same work", "Error"],
            cells,
            label="Predicted against measured",
        ),
        "predicted",
    )


def operations(analysis: Analysis) -> str:
    """Show predictions and measurements by operation; the largest effect on a step first."""
    rows = [_operation(row) for row in analysis.operations[1 : 1 + MOST_OPERATIONS]]
    if not rows:
        return ""
    head = [
        "Location",
        "Operation",
        "Plan",
        "Profile, same work",
        "Measured",
        "Error",
        "Per step",
        "Effect",
        "Share of step",
    ]
    more = len(analysis.operations) - 1 - len(rows)
    note = (
        f" {counted(more, 'operation')} with smaller errors {agree(more, 'is', 'are')} left out."
        if more > 0
        else ""
    )
    rest = (
        folded(f"{len(rows) - SHOWN} more", table(head, rows[SHOWN:])) if len(rows) > SHOWN else ""
    )
    return section(
        "Prediction and measurement by operation",
        "ms, without waiting for other ranks; sorted by the error per step, largest first. "
        f"Transfers are listed at the sending stage.{note}",
        table(head, rows[:SHOWN], label="Prediction and measurement by operation") + rest,
        "operations",
    )


def _operation(row: OperationRow) -> list[str]:
    return [
        escape(row.place),
        escape(row.operation.replace("_", " ")),
        figure(row.planned, 4),
        figure(row.predicted, 4),
        f"<b>{figure(row.measured, 4)}</b>",
        _error(row.error_pct),
        figure(row.per_step),
        f"{row.effect_ms:+,.3f}",
        percent(row.share_of_step),
    ]


def memory(analysis: Analysis) -> str:
    """Show the rank with most memory of every stage; for other programs' traces the top ranks."""
    rows = [
        [
            escape(f"{row.unit} · stage {row.stage}"),
            f"<b>{figure(row.measured_gib)} GiB</b>",
            *(
                "–" if value is None else f"{figure(value)} GiB"
                for value in (row.predicted_gib, row.limit_gib, row.outside_gib, row.reserve_gib)
            ),
            "–" if not row.limit_gib else percent(row.measured_gib / row.limit_gib),
        ]
        for row in analysis.memory
    ]
    if rows:
        return section(
            "Memory",
            "The rank with most memory of every stage. "
            + (
                GROWN
                if any(row.of_process for row in analysis.memory)
                else "The plan is for the worst sequence."
            ),
            table(
                [
                    "Stage",
                    "Peak",
                    "Planned peak",
                    "Limit",
                    "Outside PyTorch's allocator",
                    "Reserve in the plan",
                    "Share of limit",
                ],
                rows,
                label="Memory",
            ),
            "memory",
        )
    held = [rank for rank in analysis.ranks if rank.memory_peak_gib is not None]
    held.sort(key=lambda rank: -(rank.memory_peak_gib or 0.0))
    cells = [[str(rank.rank), f"{figure(rank.memory_peak_gib)} GiB"] for rank in held[:MOST_ROWS]]
    return (
        section(
            "Memory",
            "Peak memory that each rank allocated on its device, largest first.",
            table(["Rank", "Peak"], cells, narrow=True),
            "memory",
        )
        if cells
        else ""
    )


def _error(error_pct: float | None) -> str:
    """Format an error in percent, marked beyond 10 and 25."""
    if error_pct is None:
        return "–"
    kind = "far" if abs(error_pct) > 25 else "off" if abs(error_pct) > 10 else ""
    return f'<span class="{kind}">{error_pct:+,.1f} %</span>'
