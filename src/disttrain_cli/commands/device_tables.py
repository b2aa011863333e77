"""Tables of `disttrain analyze` about devices and kernel launches; formats of figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from disttrain_cli.commands.common import percent
from disttrain_cli.console import Console

if TYPE_CHECKING:
    from disttrain_cli.analysis.result.summary import Analysis

MOST_OPERATORS, MOST_RANKS, LONGEST_NAME = 8, 8, 70


def show_devices(console: Console, analysis: Analysis) -> None:
    """Print collectives by kind, FLOPs by operator, launches and queues, and the critical path.

    The report has more.
    """
    console.table(
        "Collectives by kind, ms; bandwidth of a rank's link (busbw)",
        ["kind", "ranks", "count", "MB", "transfer p50", "p95", "longest wait p50", "p95", "GB/s"],
        [
            [
                short_name(row.kind),
                row.ranks,
                row.count,
                "–" if row.bytes_p50 is None else f"{row.bytes_p50 / 1e6:.4g}",
                ms(row.transfer_p50_us),
                ms(row.transfer_p95_us),
                ms(row.wait_p50_us),
                ms(row.wait_p95_us),
                figure(row.bus_gbytes_s),
            ]
            for row in analysis.collective_kinds
        ],
    )
    console.table(
        "FLOPs by operator and shapes",
        [
            "operator",
            "shapes",
            "type",
            "calls",
            "ms",
            "TFLOP/s",
            "FLOPs per byte",
            "roof TFLOP/s",
            "bound by",
        ],
        [
            [
                short_name(row.name),
                short_name(row.shapes),
                short_name(row.dtype or "–"),
                row.count,
                ms(row.total_us),
                figure(row.tflops),
                figure(row.flops_per_byte),
                figure(row.roof_tflops),
                row.bound or "–",
            ]
            for row in analysis.operators[:MOST_OPERATORS]
        ],
    )
    waiting = {row.rank: row for row in reversed(analysis.queues)}  # the stream with most kernels
    console.table(
        "Launches, µs; queue of the stream with most kernels",
        [
            "rank",
            "launched",
            "shorter than their launch",
            "kernel p50",
            "call p50",
            "delay p50",
            "delay p95",
            "queue mean",
            "empty",
        ],
        [
            [
                row.rank,
                row.launched,
                percent(row.short / row.launched),
                figure(row.kernel_p50_us),
                figure(row.call_p50_us),
                figure(row.delay_p50_us),
                figure(row.delay_p95_us),
                figure(waiting[row.rank].mean) if row.rank in waiting else "–",
                percent(waiting[row.rank].empty_share) if row.rank in waiting else "–",
            ]
            for row in analysis.launches[:MOST_RANKS]
        ],
    )
    path = analysis.critical_path
    if path is not None:
        shares = ", ".join(f"{kind} {percent(share)}" for kind, share in path.shares.items())
        where = "everything recorded" if path.step is None else f"step {path.step}"
        console.say(f"\nCritical path of {where}, {ms(path.length_us)} ms: {shares}")


def ms(us: float | None) -> str:
    """Format µs as ms; a dash where there is no value."""
    return "–" if us is None else f"{us / 1e3:.3f}"


def short_name(name: str) -> str:
    """Shorten a name from a trace."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def figure(value: Any) -> str:
    """Format a float with its significant digits; other values as text."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.4g}"
    return f"{value:.0f}" if 1e4 <= abs(float(text)) < 1e15 else text
