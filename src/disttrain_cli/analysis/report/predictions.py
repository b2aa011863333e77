"""Tables of predictions, measurements and remedies; empty text if an `Analysis` has none."""

from __future__ import annotations

from html import escape

from disttrain_cli.analysis.figures import agree, counted
from disttrain_cli.analysis.report.words import (
    card,
    figure,
    folded,
    percent,
    seconds,
    section,
    table,
)
from disttrain_cli.analysis.result.rows import GROWN, Comparison
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
    return card(
        "What would help",
        "One change at a time, everything else as recorded, so savings do not add up."
        " Estimated by replaying the recorded steps, or, for a new plan, by the planner with"
        " this run’s times.",
        [row for row in analysis.remedies if row.worth],
        [
            ("Change", lambda row: escape(row.change)),
            ("Devices", lambda row: f"{row.gpus:+d}" if row.gpus else "same"),
            ("Step", lambda row: seconds(row.step_s)),
            ("Saved", lambda row: seconds(row.gain_s)),
            ("Share of step", lambda row: percent(row.gain_pct / 100)),
            ("Next command", lambda row: f"<code>{escape(row.command)}</code>"),
        ],
        "remedies",
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
    more = len(analysis.operations) - 1 - MOST_OPERATIONS
    note = (
        f" {counted(more, 'operation')} with smaller errors {agree(more, 'is', 'are')} left out."
        if more > 0
        else ""
    )
    return card(
        "Prediction and measurement by operation",
        "ms, without waiting for other ranks; sorted by the error per step, largest first. "
        f"Transfers are listed at the sending stage.{note}",
        analysis.operations[1 : 1 + MOST_OPERATIONS],
        [
            ("Location", lambda row: escape(row.place)),
            ("Operation", lambda row: escape(row.operation.replace("_", " "))),
            ("Plan", lambda row: figure(row.planned, 4)),
            ("Profile, same work", lambda row: figure(row.predicted, 4)),
            ("Measured", lambda row: f"<b>{figure(row.measured, 4)}</b>"),
            ("Error", lambda row: _error(row.error_pct)),
            ("Per step", lambda row: figure(row.per_step)),
            ("Effect", lambda row: f"{row.effect_ms:+,.3f}"),
            ("Share of step", lambda row: percent(row.share_of_step)),
        ],
        "operations",
        shown=SHOWN,
    )


def memory(analysis: Analysis) -> str:
    """Show the rank with most memory of every stage; for other programs' traces the top ranks."""

    def gib(value: float | None) -> str:
        return "–" if value is None else f"{figure(value)} GiB"

    if analysis.memory:
        return card(
            "Memory",
            "The rank with most memory of every stage. "
            + (
                GROWN
                if any(row.of_process for row in analysis.memory)
                else "The plan is for the worst sequence."
            ),
            analysis.memory,
            [
                ("Stage", lambda row: escape(f"{row.unit} · stage {row.stage}")),
                ("Peak", lambda row: f"<b>{gib(row.measured_gib)}</b>"),
                ("Planned peak", lambda row: gib(row.predicted_gib)),
                ("Limit", lambda row: gib(row.limit_gib)),
                ("Outside PyTorch's allocator", lambda row: gib(row.outside_gib)),
                ("Reserve in the plan", lambda row: gib(row.reserve_gib)),
                (
                    "Share of limit",
                    lambda row: percent(row.measured_gib / row.limit_gib) if row.limit_gib else "–",
                ),
            ],
            "memory",
        )
    held = [rank for rank in analysis.ranks if rank.memory_peak_gib is not None]
    held.sort(key=lambda rank: -(rank.memory_peak_gib or 0.0))
    return card(
        "Memory",
        "Peak memory that each rank allocated on its device, largest first.",
        held[:MOST_ROWS],
        [("Rank", lambda rank: str(rank.rank)), ("Peak", lambda rank: gib(rank.memory_peak_gib))],
        "memory",
        narrow=True,
    )


def _error(error_pct: float | None) -> str:
    """Format an error in percent, marked beyond 10 and 25."""
    if error_pct is None:
        return "–"
    kind = "far" if abs(error_pct) > 25 else "off" if abs(error_pct) > 10 else ""
    return f'<span class="{kind}">{error_pct:+,.1f} %</span>'
