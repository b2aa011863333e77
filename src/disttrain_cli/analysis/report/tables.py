"""Tables of recorded figures from an `Analysis`; empty text if it has none."""

from __future__ import annotations

from collections import Counter
from html import escape

from disttrain_cli.analysis.figures import agree
from disttrain_cli.analysis.report.words import (
    Columns,
    card,
    figure,
    folded,
    grid,
    kernel,
    percent,
    place,
    seconds,
    section,
)
from disttrain_cli.analysis.result.rows import HostClock, RankSummary
from disttrain_cli.analysis.result.summary import Analysis, UnitSummary

#: Most rows; the page states how many more are left out.
MOST_RANKS, MOST_ROWS = 256, 24


def units(analysis: Analysis) -> str:
    """Show one row per unit."""
    has_cp = any(unit.cp > 1 for unit in analysis.units)

    def degrees(unit: UnitSummary) -> str:
        return " · ".join(
            str(n) for n in (unit.tp, *([unit.cp] if has_cp else []), unit.dp, unit.pp)
        )

    return card(
        "Units",
        "Times per rank and step. On a CPU a unit’s share of the peak is its share of the ranks.",
        analysis.units,
        [
            ("Unit", lambda unit: escape(unit.name)),
            ("TP · CP · DP · PP" if has_cp else "TP · DP · PP", degrees),
            ("GPUs", lambda unit: str(unit.gpus)),
            ("MFU", lambda unit: percent(unit.mfu)),
            ("Busy", lambda unit: percent(unit.busy_fraction)),
            ("Compute", lambda unit: seconds(unit.compute_s)),
            ("Fill, drain", lambda unit: seconds(unit.warmup_drain_s)),
            ("Waits: unit", lambda unit: seconds(unit.other_unit_s)),
            ("stage", lambda unit: seconds(unit.other_stage_s)),
            ("data", lambda unit: seconds(unit.data_wait_s)),
            ("Transfers", lambda unit: seconds(unit.transfer_s)),
            ("Update", lambda unit: seconds(unit.update_s)),
            ("Host", lambda unit: seconds(unit.gap_s)),
        ],
        "units",
    )


def slowest(analysis: Analysis) -> str:
    """Show the slowest stage, replica and slot."""
    return card(
        "Slowest stage, replica and slot",
        "The last column divides by the time that the recorded work should take: "
        "values above 1 mean slow hardware or a wrong profile, not heavy data.",
        analysis.slowest,
        [
            ("Slowest", lambda row: f"{escape(row.kind)} {row.number}"),
            ("Unit", lambda row: escape(row.unit or "all units")),
            ("Compute of a slot", lambda row: f"{figure(row.mean_ms)} ms"),
            ("÷ mean", lambda row: f"{row.ratio:.3f}"),
            (
                "÷ mean, same work",
                lambda row: "–" if row.normalised_ratio is None else f"{row.normalised_ratio:.3f}",
            ),
        ],
    )


def collectives(analysis: Analysis) -> str:
    """Show the rank that joined each collective last, and how long the others waited."""
    more = len(analysis.collectives) - MOST_ROWS
    note = f" {more} more {agree(more, 'costs', 'cost')} less." if more > 0 else ""
    return card(
        "Collectives",
        "Matched across ranks, including messages (a send and its receive); longest waiting "
        f"first. The other ranks wait for the last to arrive.{note}",
        analysis.collectives[:MOST_ROWS],
        [
            ("Collective", lambda row: escape(row.name)),
            ("Group", lambda row: escape(row.group)),
            ("Step", lambda row: "–" if row.step is None else str(row.step)),
            ("No.", lambda row: str(row.index)),
            ("Ranks", lambda row: str(row.ranks)),
            ("Last to arrive", lambda row: f"<b>{row.last_rank}</b>"),
            ("Longest wait", lambda row: seconds(row.longest_wait_us / 1e6)),
            ("Mean wait", lambda row: seconds(row.mean_wait_us / 1e6)),
            ("Transfer", lambda row: seconds(row.transfer_us / 1e6)),
        ],
        "collectives",
    )


def kernels(analysis: Analysis) -> str:
    """Show the kernels that take most time."""
    return card(
        "Kernels with the largest total time",
        "Over the measured steps of all ranks.",
        analysis.kernels[:MOST_ROWS],
        [
            ("Kernel", lambda row: kernel(row.name)),
            ("Kind", lambda row: escape(row.kind)),
            ("Runs", lambda row: f"{row.count:,}"),
            ("Total", lambda row: seconds(row.total_us / 1e6)),
            ("Longest", lambda row: seconds(row.longest_us / 1e6)),
            ("Share of all kernels", lambda row: percent(row.share)),
        ],
        "kernels",
    )


def hosts(analysis: Analysis) -> str:
    """Show one row per host: its ranks' compute, and its clock."""
    clocks = {clock.host: clock for clock in analysis.clocks}
    measured_s = (analysis.job.iteration_s or 0.0) * analysis.job.steps_measured
    on_host: dict[str, list[RankSummary]] = {}
    for rank in analysis.ranks:
        if rank.host is not None:
            on_host.setdefault(rank.host, []).append(rank)

    def placed(ranks: list[RankSummary]) -> str:
        units = Counter(rank.unit for rank in ranks if rank.unit)
        return escape(", ".join(f"{unit} {count}" for unit, count in units.items()))

    def compute(ranks: list[RankSummary]) -> str:
        compute_s = sum(rank.compute_us or 0.0 for rank in ranks) / 1e6
        return percent(compute_s / len(ranks) / measured_s) if measured_s else "–"

    return card(
        "Hosts",
        "Shares of ranks × window of a step; clock offsets relative to rank 0’s host.",
        list(on_host.items()),
        [
            ("Host", lambda item: escape(item[0])),
            ("Ranks", lambda item: str(len(item[1]))),
            ("Units", lambda item: placed(item[1])),
            ("Compute", lambda item: compute(item[1])),
            ("Clock", lambda item: _clock(clocks.get(item[0]))),
        ],
        "hosts",
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
    parts = [(row, part) for row in shown for part in row.top]
    breakdown = grid(
        shown,
        [
            ("Stage", lambda row: escape(f"{row.unit} · stage {row.stage}")),
            ("Operation", lambda row: escape(" ".join(filter(None, (row.operation, row.module))))),
            ("Profiled", lambda row: f"{figure(row.profiled_ms)} ms"),
            ("Usually", lambda row: "–" if row.usual_ms is None else f"{figure(row.usual_ms)} ms"),
            *(
                (escape(kind), lambda row, kind=kind: percent(row.shares.get(kind, 0.0)))
                for kind in kinds
            ),
        ],
        label="Inside an operation",
    )
    largest = grid(
        parts,
        [
            (
                "Operation",
                lambda both: escape(
                    f"{both[0].unit} · stage {both[0].stage} · {both[0].operation}"
                ),
            ),
            ("Kernel or operator", lambda both: kernel(both[1].name)),
            ("Kind", lambda both: escape(both[1].kind)),
            ("Runs", lambda both: figure(both[1].count)),
            ("Share of its time", lambda both: percent(both[1].share)),
        ],
    )
    return section(
        "Inside an operation",
        "Breakdown of an operation’s time from torch’s profile of the steps of "
        "<code>--profile-steps</code>; idle: no kernel ran (on a CPU: no operator).",
        breakdown + folded(f"Kernels and operators ({len(parts)})", largest),
        "inside",
    )


def ranks(analysis: Analysis) -> str:
    """Show the time of every rank, folded."""
    if not analysis.ranks:
        return ""
    has_units = any(rank.unit is not None for rank in analysis.ranks)
    arrivals = any(rank.last_to_arrive is not None for rank in analysis.ranks)
    exposed = any(rank.exposed_communication_us is not None for rank in analysis.ranks)

    def location(rank: RankSummary) -> str:
        return place(unit=rank.unit, stage=rank.stage, replica=rank.replica, cp_rank=rank.cp_rank)

    columns: Columns[RankSummary] = [
        ("Rank", lambda rank: str(rank.rank)),
        ("Unit · stage · replica", location),
        ("Host", lambda rank: escape(rank.host or "–")),
        ("Span", lambda rank: _ms(rank.span_us)),
        ("Compute", lambda rank: _ms(rank.compute_us)),
        ("Non-compute", lambda rank: _ms(rank.non_compute_us)),
        ("Idle", lambda rank: _ms(rank.idle_us)),
        ("Exposed communication", lambda rank: _ms(rank.exposed_communication_us)),
        ("Exposed waiting", lambda rank: _ms(rank.exposed_wait_us)),
        ("Wait in collectives", lambda rank: _ms(rank.collective_wait_us)),
        ("Overlap", lambda rank: "–" if rank.overlap_pct is None else f"{rank.overlap_pct:.2f} %"),
        (
            "Last to arrive",
            lambda rank: "–" if rank.last_to_arrive is None else str(rank.last_to_arrive),
        ),
    ]
    recorded = {
        "Unit · stage · replica": has_units,
        "Exposed communication": exposed,
        "Exposed waiting": exposed,
        "Last to arrive": arrivals,
    }
    columns = [column for column in columns if recorded.get(column[0], True)]
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
            + grid(analysis.ranks[:MOST_RANKS], columns, label="Ranks"),
        )
        + "</section>"
    )


def _ms(us: float | None) -> str:
    return "–" if us is None else f"{us / 1e3:,.1f}"
