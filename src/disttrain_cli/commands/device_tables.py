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
    console.grid(
        "Collectives by kind, ms; bandwidth of a rank's link (busbw)",
        analysis.collective_kinds,
        [
            ("kind", lambda row: short_name(row.kind)),
            ("ranks", lambda row: row.ranks),
            ("count", lambda row: row.count),
            ("MB", lambda row: "–" if row.bytes_p50 is None else f"{row.bytes_p50 / 1e6:.4g}"),
            ("transfer p50", lambda row: ms(row.transfer_p50_us)),
            ("p95", lambda row: ms(row.transfer_p95_us)),
            ("longest wait p50", lambda row: ms(row.wait_p50_us)),
            ("p95", lambda row: ms(row.wait_p95_us)),
            ("GB/s", lambda row: figure(row.bus_gbytes_s)),
        ],
    )
    console.grid(
        "FLOPs by operator and shapes",
        analysis.operators[:MOST_OPERATORS],
        [
            ("operator", lambda row: short_name(row.name)),
            ("shapes", lambda row: short_name(row.shapes)),
            ("type", lambda row: short_name(row.dtype or "–")),
            ("calls", lambda row: row.count),
            ("ms", lambda row: ms(row.total_us)),
            ("TFLOP/s", lambda row: figure(row.tflops)),
            ("FLOPs per byte", lambda row: figure(row.flops_per_byte)),
            ("roof TFLOP/s", lambda row: figure(row.roof_tflops)),
            ("bound by", lambda row: row.bound or "–"),
        ],
    )
    waiting = {row.rank: row for row in reversed(analysis.queues)}  # the stream with most kernels
    console.grid(
        "Launches, µs; queue of the stream with most kernels",
        analysis.launches[:MOST_RANKS],
        [
            ("rank", lambda row: row.rank),
            ("launched", lambda row: row.launched),
            ("shorter than their launch", lambda row: percent(row.short / row.launched)),
            ("kernel p50", lambda row: figure(row.kernel_p50_us)),
            ("call p50", lambda row: figure(row.call_p50_us)),
            ("delay p50", lambda row: figure(row.delay_p50_us)),
            ("delay p95", lambda row: figure(row.delay_p95_us)),
            (
                "queue mean",
                lambda row: figure(waiting[row.rank].mean) if row.rank in waiting else "–",
            ),
            (
                "empty",
                lambda row: percent(waiting[row.rank].empty_share) if row.rank in waiting else "–",
            ),
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
