"""Tables of the page, from an `Analysis`; empty text where it has nothing for one."""

from __future__ import annotations

from collections import Counter
from html import escape

from disttrain_cli.analysis.report.words import (
    figure,
    folded,
    kernel,
    percent,
    place,
    seconds,
    section,
    table,
)
from disttrain_cli.analysis.result.rows import Comparison, HostClock, OperationRow
from disttrain_cli.analysis.result.summary import Analysis

#: Rows; what is beyond is left out, and the page says so.
MOST_RANKS, MOST_OPERATIONS, MOST_ROWS, MOST_GROUPS = 256, 120, 24, 12
SHOWN = 10  # operations before the fold
_FIGURES = {
    "iteration_s": "step time",
    "sequences_per_s": "sequences per second",
    "mfu": "MFU",
    "bubble_fraction": "bubble",
    "stage_ms": "slowest stage per slot",
}


def units(analysis: Analysis) -> str:
    """One row per unit."""
    rows = [
        [
            escape(unit.name),
            f"{unit.tp} · {unit.dp} · {unit.pp}",
            str(unit.gpus),
            percent(unit.mfu),
            percent(unit.busy_fraction),
            *(
                seconds(value)
                for value in (
                    unit.compute_s,
                    unit.warmup_drain_s,
                    unit.other_unit_s,
                    unit.other_stage_s,
                    unit.data_wait_s,
                    unit.transfer_s,
                    unit.update_s,
                    unit.gap_s,
                )
            ),
        ]
        for unit in analysis.units
    ]
    head = [
        "Unit",
        "TP · DP · PP",
        "GPUs",
        "MFU",
        "Busy",
        "Compute",
        "Fill, drain",
        "Waits: unit",
        "stage",
        "data",
        "Transfers",
        "Update",
        "Host",
    ]
    return (
        section(
            "Units",
            "Times per rank and step. On a CPU a unit’s share of the peak is its share of the"
            " ranks.",
            table(head, rows, label="Units"),
            "units",
        )
        if rows
        else ""
    )


def slowest(analysis: Analysis) -> str:
    """The slowest stage, replica and slot."""
    rows = [
        [
            f"{escape(row.kind)} {row.number}",
            escape(row.unit or "all units"),
            f"{figure(row.mean_ms)} ms",
            f"{row.ratio:.3f}",
            "–" if row.normalised_ratio is None else f"{row.normalised_ratio:.3f}",
        ]
        for row in analysis.slowest
    ]
    return (
        section(
            "Slowest of their kind",
            "The last column divides by the time that the recorded work should take: "
            "what stays above 1 is slow hardware or a wrong profile, not heavy data.",
            table(
                ["Slowest", "Of", "Compute of a slot", "÷ mean", "÷ mean, same work"],
                rows,
                label="Slowest of their kind",
            ),
        )
        if rows
        else ""
    )


def collectives(analysis: Analysis) -> str:
    """Who came last, and how long the others waited."""
    rows = [
        [
            escape(row.name),
            escape(row.group),
            "–" if row.step is None else str(row.step),
            str(row.index),
            str(row.ranks),
            f"<b>{row.last_rank}</b>",
            seconds(row.longest_wait_us / 1e6),
            seconds(row.mean_wait_us / 1e6),
            seconds(row.transfer_us / 1e6),
        ]
        for row in analysis.collectives[:MOST_ROWS]
    ]
    more = len(analysis.collectives) - len(rows)
    note = f" {more} more cost less." if more > 0 else ""
    return (
        section(
            "Collectives",
            "Matched over ranks, messages (a send and its receive) too; those that cost most "
            f"waiting first. The last to arrive keeps the others waiting.{note}",
            table(
                [
                    "Collective",
                    "Group",
                    "Step",
                    "No.",
                    "Ranks",
                    "Last to arrive",
                    "Longest wait",
                    "Mean wait",
                    "Transfer",
                ],
                rows,
                label="Collectives",
            ),
            "collectives",
        )
        if rows
        else ""
    )


def kernels(analysis: Analysis) -> str:
    """The kernels that take most time."""
    rows = [
        [
            kernel(row.name),
            escape(row.kind),
            f"{row.count:,}",
            seconds(row.total_us / 1e6),
            seconds(row.longest_us / 1e6),
            percent(row.share),
        ]
        for row in analysis.kernels[:MOST_ROWS]
    ]
    return (
        section(
            "Kernels that take most time",
            "Over the measured steps of all ranks.",
            table(
                ["Kernel", "Kind", "Runs", "In all", "Longest", "Of all kernels"],
                rows,
                label="Kernels",
            ),
            "kernels",
        )
        if rows
        else ""
    )


def hosts(analysis: Analysis) -> str:
    """One row per host: what its ranks did, and its clock."""
    names = list(dict.fromkeys(rank.host for rank in analysis.ranks if rank.host is not None))
    clocks = {clock.host: clock for clock in analysis.clocks}
    measured_s = (analysis.job.iteration_s or 0.0) * analysis.job.steps_measured
    rows = []
    for name in names:
        on_host = [rank for rank in analysis.ranks if rank.host == name]
        units = Counter(rank.unit for rank in on_host if rank.unit)
        rows.append(
            [
                escape(name),
                str(len(on_host)),
                escape(", ".join(f"{unit} {count}" for unit, count in units.items())),
                (
                    percent(
                        sum(rank.compute_us or 0.0 for rank in on_host)
                        / 1e6
                        / len(on_host)
                        / measured_s
                    )
                    if measured_s
                    else "–"
                ),
                _clock(clocks.get(name)),
            ]
        )
    return (
        section(
            "Hosts",
            "Shares of ranks × window of a step; the clock against that of rank 0’s host.",
            table(["Host", "Ranks", "Of units", "Compute", "Clock"], rows, label="Hosts"),
            "hosts",
        )
        if rows
        else ""
    )


def _clock(clock: HostClock | None) -> str:
    if clock is None or clock.offset_us is None:
        return "–"
    if not clock.offset_us and not clock.error_us:
        return "the reference"
    return f"{clock.offset_us:+,.0f} ± {clock.error_us or 0:,.0f} µs" + (
        "" if clock.applied else ", left as it is"
    )


def inside(analysis: Analysis) -> str:
    """What torch's profile says of the time of our operations."""
    if not analysis.inside:
        return ""
    kinds = list(dict.fromkeys(kind for row in analysis.inside for kind in row.shares))
    kinds = [kind for kind in kinds if kind != "idle"] + ["idle"]
    shown = analysis.inside[:MOST_ROWS]
    rows = [
        [
            escape(f"{row.unit} · stage {row.stage}"),
            escape(" ".join(filter(None, (row.operation, row.module)))),
            f"{figure(row.profiled_ms)} ms",
            "–" if row.usual_ms is None else f"{figure(row.usual_ms)} ms",
            *(percent(row.shares.get(kind, 0.0)) for kind in kinds),
        ]
        for row in shown
    ]
    parts = [
        [
            escape(f"{row.unit} · stage {row.stage} · {row.operation}"),
            kernel(part.name),
            escape(part.kind),
            figure(part.count),
            percent(part.share),
        ]
        for row in shown
        for part in row.top
    ]
    return section(
        "Inside an operation",
        "By torch’s profile of the steps of <code>--profile-steps</code>, what the "
        "time of an operation is made of; idle: no kernel ran (on a CPU: no operator).",
        table(
            ["Stage", "Operation", "Profiled", "Usually", *map(escape, kinds)],
            rows,
            label="Inside an operation",
        )
        + folded(
            f"Kernels and operators ({len(parts)})",
            table(["Operation", "Kernel or operator", "Kind", "Runs", "Of its time"], parts),
        ),
        "inside",
    )


def remedies(analysis: Analysis) -> str:
    """What single changes would gain."""
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
            "One change at a time, everything else as recorded, so gains do not add up: the "
            "recorded steps played again, or, for a new plan, the planner with this run’s times.",
            table(
                ["With", "Devices", "Step", "Gain", "Of the step", "Next"],
                rows,
                label="What would help",
            ),
            "remedies",
        )
        if rows
        else ""
    )


def what_if(analysis: Analysis) -> str:
    """The published study's slowdowns."""
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
        "In the definition of the study “Understanding Stragglers in Large Model Training Using"
        f" What-if Analysis”, ideals over all stages alike: S = <b>{search.slowdown:.4f}</b>."
        f" {sentence}{'.' if sentence else ''} Below: the slowdown if only one of them were as"
        f" recorded; at most {MOST_GROUPS} of a kind.",
        folded(
            f"By stage, replica and operation ({len(rows)})",
            table(["As recorded", "Slowdown"], rows, narrow=True),
        ),
        "what-if",
    )


def predicted(analysis: Analysis) -> str:
    """Predictions beside measurements, one line per figure; errors beyond 10 and 25 % are
    marked."""
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

    cells = []
    for unit, what in dict.fromkeys((row.unit, row.what) for row in rows):
        of = {row.basis: row for row in rows if (row.unit, row.what) == (unit, what)}
        measured = next(iter(of.values()))
        cells.append(
            [
                f"{escape(unit or 'job')}: {escape(_FIGURES.get(what, what))}",
                f"<b>{shown(measured.measured, measured.measure)}</b>",
                *both(of.get("plan")),
                *both(of.get("same work")),
            ]
        )
    return section(
        "Predicted against measured",
        "The plan expects mean data; the profile, asked for the very sizes "
        "that were recorded, shows how much of the error is its own.",
        table(
            ["Figure", "Measured", "Plan", "off by", "Profile, same work", "off by"],
            cells,
            label="Predicted against measured",
        ),
        "predicted",
    )


def operations(analysis: Analysis) -> str:
    """Where prediction and measurement part, operation by operation; the largest effect on a step
    first."""
    rows = [_operation(row) for row in analysis.operations[1 : 1 + MOST_OPERATIONS]]
    if not rows:
        return ""
    head = [
        "Where",
        "Operation",
        "Plan",
        "Profile, same work",
        "Measured",
        "off by",
        "Per step",
        "adds",
        "Of the step",
    ]
    more = len(analysis.operations) - 1 - len(rows)
    note = f" {more} operations with smaller ones are left out." if more > 0 else ""
    rest = (
        folded(f"{len(rows) - SHOWN} more", table(head, rows[SHOWN:])) if len(rows) > SHOWN else ""
    )
    return section(
        "Prediction and measurement by operation",
        "ms, without waiting for other ranks; the largest error "
        f"in a step first. Transfers are named by the stage before the cut.{note}",
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
    """The fullest rank of every stage; of other programs' traces the fullest ranks."""
    rows = [
        [
            escape(f"{row.unit} · stage {row.stage}"),
            f"<b>{figure(row.measured_gib)} GiB</b>",
            *(
                "–" if value is None else f"{figure(value)} GiB"
                for value in (row.predicted_gib, row.limit_gib)
            ),
            "–" if not row.limit_gib else percent(row.measured_gib / row.limit_gib),
        ]
        for row in analysis.memory
    ]
    if rows:
        return section(
            "Memory",
            "Of the fullest rank of every stage. The plan counts the worst sequence.",
            table(
                ["Stage", "Most held", "Plan expects up to", "Limit", "Of the limit"],
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
            "The most that each rank allocated on its device; the fullest first.",
            table(["Rank", "Most held"], cells, narrow=True),
            "memory",
        )
        if cells
        else ""
    )


def ranks(analysis: Analysis) -> str:
    """Time of every rank, folded."""
    if not analysis.ranks:
        return ""
    has_units = any(rank.unit is not None for rank in analysis.ranks)
    arrivals = any(rank.last_to_arrive is not None for rank in analysis.ranks)
    exposed = any(rank.exposed_communication_us is not None for rank in analysis.ranks)
    head = [
        "Rank",
        *(["Unit · stage · replica"] if has_units else []),
        "Host",
        "Span",
        "Compute",
        "Non-compute",
        "Idle",
        *(["Exposed communication", "Exposed waiting"] if exposed else []),
        "Wait in collectives",
        "Overlap",
        *(["Last to arrive"] if arrivals else []),
    ]
    rows = [
        [
            str(rank.rank),
            *([place(unit=rank.unit, stage=rank.stage, replica=rank.replica)] if has_units else []),
            escape(rank.host or "–"),
            *(
                _ms(value)
                for value in (
                    rank.span_us,
                    rank.compute_us,
                    rank.non_compute_us,
                    rank.idle_us,
                    *([rank.exposed_communication_us, rank.exposed_wait_us] if exposed else []),
                    rank.collective_wait_us,
                )
            ),
            "–" if rank.overlap_pct is None else f"{rank.overlap_pct:.2f} %",
            *(
                [str(rank.last_to_arrive if rank.last_to_arrive is not None else "–")]
                if arrivals
                else []
            ),
        ]
        for rank in analysis.ranks[:MOST_RANKS]
    ]
    more = (
        f" The first {MOST_RANKS} of {len(analysis.ranks)}."
        if len(analysis.ranks) > MOST_RANKS
        else ""
    )
    return (
        '<section id="ranks">'
        + folded(
            f"Ranks ({len(analysis.ranks)})",
            '<p class="note">ms over the measured steps, in the definitions of '
            f"HolisticTraceAnalysis; waiting for data is idle.{more}</p>"
            + table(head, rows, label="Ranks"),
        )
        + "</section>"
    )


def _ms(us: float | None) -> str:
    return "–" if us is None else f"{us / 1e3:,.1f}"


def _error(error_pct: float | None) -> str:
    """An error in percent, marked beyond 10 and 25."""
    if error_pct is None:
        return "–"
    kind = "far" if abs(error_pct) > 25 else "off" if abs(error_pct) > 10 else ""
    return f'<span class="{kind}">{error_pct:+,.1f} %</span>'
