"""Tables of recorded figures from an `Analysis`; empty text if it has none."""

from __future__ import annotations

from collections import Counter
from html import escape

from disttrain_cli.analysis.figures import agree
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
from disttrain_cli.analysis.result.rows import HostClock
from disttrain_cli.analysis.result.summary import Analysis

#: Most rows; the page states how many more are left out.
MOST_RANKS, MOST_ROWS = 256, 24


def units(analysis: Analysis) -> str:
    """Show one row per unit."""
    has_cp = any(unit.cp > 1 for unit in analysis.units)
    rows = [
        [
            escape(unit.name),
            " · ".join(str(n) for n in (unit.tp, *([unit.cp] if has_cp else []), unit.dp, unit.pp)),
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
        "TP · CP · DP · PP" if has_cp else "TP · DP · PP",
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
    """Show the slowest stage, replica and slot."""
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
            "Slowest stage, replica and slot",
            "The last column divides by the time that the recorded work should take: "
            "values above 1 mean slow hardware or a wrong profile, not heavy data.",
            table(
                ["Slowest", "Unit", "Compute of a slot", "÷ mean", "÷ mean, same work"],
                rows,
                label="Slowest stage, replica and slot",
            ),
        )
        if rows
        else ""
    )


def collectives(analysis: Analysis) -> str:
    """Show the rank that joined each collective last, and how long the others waited."""
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
    note = f" {more} more {agree(more, 'costs', 'cost')} less." if more > 0 else ""
    return (
        section(
            "Collectives",
            "Matched across ranks, including messages (a send and its receive); longest waiting "
            f"first. The other ranks wait for the last to arrive.{note}",
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
    """Show the kernels that take most time."""
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
            "Kernels with the largest total time",
            "Over the measured steps of all ranks.",
            table(
                ["Kernel", "Kind", "Runs", "Total", "Longest", "Share of all kernels"],
                rows,
                label="Kernels",
            ),
            "kernels",
        )
        if rows
        else ""
    )


def hosts(analysis: Analysis) -> str:
    """Show one row per host: its ranks' compute, and its clock."""
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
            "Shares of ranks × window of a step; clock offsets relative to rank 0’s host.",
            table(["Host", "Ranks", "Units", "Compute", "Clock"], rows, label="Hosts"),
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
        "" if clock.applied else ", not corrected"
    )


def inside(analysis: Analysis) -> str:
    """Show the breakdown of operations by torch's profile."""
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
        "Breakdown of an operation’s time from torch’s profile of the steps of "
        "<code>--profile-steps</code>; idle: no kernel ran (on a CPU: no operator).",
        table(
            ["Stage", "Operation", "Profiled", "Usually", *map(escape, kinds)],
            rows,
            label="Inside an operation",
        )
        + folded(
            f"Kernels and operators ({len(parts)})",
            table(["Operation", "Kernel or operator", "Kind", "Runs", "Share of its time"], parts),
        ),
        "inside",
    )


def ranks(analysis: Analysis) -> str:
    """Show the time of every rank, folded."""
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
            *(
                [
                    place(
                        unit=rank.unit, stage=rank.stage, replica=rank.replica, cp_rank=rank.cp_rank
                    )
                ]
                if has_units
                else []
            ),
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
            '<p class="note">ms over the measured steps, as defined by '
            f"HolisticTraceAnalysis; waiting for data is idle.{more}</p>"
            + table(head, rows, label="Ranks"),
        )
        + "</section>"
    )


def _ms(us: float | None) -> str:
    return "–" if us is None else f"{us / 1e3:,.1f}"
