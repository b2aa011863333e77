"""Sections on devices and launches, for Kineto traces; empty text if an analysis has none."""

from __future__ import annotations

from html import escape

from disttrain_cli.analysis.figures import counted
from disttrain_cli.analysis.report.charts import share_bar
from disttrain_cli.analysis.report.words import (
    Columns,
    card,
    figure,
    folded,
    grid,
    kernel,
    percent,
    seconds,
    section,
)
from disttrain_cli.analysis.result.devices import LaunchRow, OperatorRow
from disttrain_cli.analysis.result.summary import Analysis

MOST_ROWS, SHOWN = 24, 10
#: Kinds of a critical path: class of the colour, and name.
_PATH = {
    "compute": ("compute", "Compute"),
    "communication": ("communication", "Communication"),
    "memory": ("memory", "Copies"),
    "unclassified": ("other", "Unclassified kernels"),
    "host": ("gap", "Host, while the device waits"),
    "launch": ("load", "Launches and gaps"),
}


def collective_kinds(analysis: Analysis) -> str:
    """Show bandwidth and distribution of every kind of collective."""
    return card(
        "Collectives by kind",
        "Transfer: from the last arrival to the last end. Wait: of the rank that waited "
        "longest. Bandwidth: median bus bandwidth as defined by nccl-tests (busbw).",
        analysis.collective_kinds[:MOST_ROWS],
        [
            ("Kind", lambda row: escape(row.kind)),
            ("Ranks", lambda row: str(row.ranks)),
            ("Count", lambda row: f"{row.count:,}"),
            ("Bytes per rank", lambda row: _bytes(row.bytes_p50)),
            ("Transfer p50", lambda row: seconds(row.transfer_p50_us / 1e6)),
            ("p95", lambda row: seconds(row.transfer_p95_us / 1e6)),
            ("longest", lambda row: seconds(row.transfer_max_us / 1e6)),
            ("Wait p50", lambda row: seconds(row.wait_p50_us / 1e6)),
            ("p95", lambda row: seconds(row.wait_p95_us / 1e6)),
            ("longest", lambda row: seconds(row.wait_max_us / 1e6)),
            (
                "Bandwidth",
                lambda row: (
                    "–" if row.bus_gbytes_s is None else f"<b>{figure(row.bus_gbytes_s)}</b> GB/s"
                ),
            ),
        ],
        "collective-kinds",
    )


def operators(analysis: Analysis) -> str:
    """Show FLOPs of operators, and their share of the device's roof."""

    def share_of_roof(row: OperatorRow) -> str:
        if row.roof_tflops is None or row.tflops is None:
            return "–"
        return percent(row.tflops / row.roof_tflops)

    unknown = (
        ""
        if any(row.roof_tflops is not None for row in analysis.operators)
        else " The roof is unknown: the catalogue lacks this device or its figures for these types."
    )
    return card(
        "FLOPs by operator",
        "FLOPs from the recorded shapes ÷ time of the kernels that each operator launches. The"
        " roof is the smaller of the device’s peak and its memory bandwidth times the FLOPs per"
        " byte (fp32 without TF32)." + unknown,
        analysis.operators[: 4 * MOST_ROWS],
        [
            ("Operator", lambda row: kernel(row.name)),
            ("Shapes", lambda row: f'<span class="shapes">{escape(row.shapes)}</span>'),
            ("Type", lambda row: escape(row.dtype or "–")),
            ("Calls", lambda row: f"{row.count:,}"),
            ("Total", lambda row: seconds(row.total_us / 1e6)),
            ("Share of compute", lambda row: percent(row.share)),
            ("FLOPs per call", lambda row: _flops(row.flops)),
            ("TFLOP/s", lambda row: "–" if row.tflops is None else f"<b>{figure(row.tflops)}</b>"),
            ("FLOPs per byte", lambda row: figure(row.flops_per_byte)),
            ("Roof", lambda row: figure(row.roof_tflops)),
            ("Share of roof", share_of_roof),
            ("Bound by", lambda row: row.bound or "–"),
        ],
        "operators-flops",
        shown=SHOWN,
    )


def critical_path(analysis: Analysis) -> str:
    """Show the kernels and gaps that determine the length of a step."""
    path = analysis.critical_path
    if path is None:
        return ""
    bar = share_bar(
        [(*_PATH.get(kind, ("other", kind)), share) for kind, share in path.shares.items()]
    )
    ranks = ", ".join(
        f"rank {rank} {percent(share)}"
        for rank, share in sorted(path.ranks.items(), key=lambda item: -item[1])[:8]
    )
    parts = grid(
        path.parts,
        [
            ("Kernel", lambda part: kernel(part.name)),
            ("Kind", lambda part: escape(part.kind)),
            ("Rank", lambda part: str(part.rank)),
            ("Count", lambda part: f"{part.count:,}"),
            ("On the path", lambda part: seconds(part.us / 1e6)),
            ("Share", lambda part: percent(part.share)),
        ],
    )
    step = "everything recorded" if path.step is None else f"step {path.step}"
    return section(
        "Critical path",
        f"Of {step}: {seconds(path.length_us / 1e6)}, traced back from the last kernel through its"
        f" dependencies on hosts and ranks. It runs through {ranks}.",
        bar + folded(f"Parts ({len(path.parts)})", parts),
        "critical-path",
    )


def launches(analysis: Analysis) -> str:
    """Show launches of the hosts, and queues of the devices."""
    rows = analysis.launches[: 4 * MOST_ROWS]
    if not rows:
        return ""
    columns: Columns[LaunchRow] = [
        ("Rank", lambda row: str(row.rank)),
        ("Launched", lambda row: f"{row.launched:,}"),
        ("Shorter than their launch", lambda row: f"{row.short:,}"),
        ("Share", lambda row: percent(row.short / row.launched)),
        ("Kernel p50", lambda row: f"{figure(row.kernel_p50_us)} µs"),
        ("Call p50", lambda row: f"{figure(row.call_p50_us)} µs"),
        ("Delay p50", lambda row: f"{figure(row.delay_p50_us)} µs"),
        ("p95", lambda row: f"{figure(row.delay_p95_us)} µs"),
        ("longest", lambda row: f"{figure(row.delay_max_us)} µs"),
    ]
    more = len(rows) - SHOWN
    queues = analysis.queues[: 4 * MOST_ROWS]
    streams = grid(
        queues,
        [
            ("Rank", lambda row: str(row.rank)),
            ("Stream", lambda row: str(row.stream)),
            ("Kernels", lambda row: f"{row.kernels:,}"),
            ("Mean length", lambda row: figure(row.mean)),
            ("Longest", lambda row: str(row.longest)),
            ("Empty", lambda row: percent(row.empty_share)),
        ],
    )
    return section(
        "Launches",
        "Kernels, copies and fills; the delay is from the end of the call to the start on the"
        " device. Many kernels that are shorter than the call that launches them, and an empty"
        " queue, mean that the job is bound by the host.",
        grid(rows[:SHOWN], columns, label="Launches")
        + (folded(counted(more, "more rank"), grid(rows[SHOWN:], columns)) if more > 0 else "")
        + folded(f"Queues of the streams ({len(queues)})", streams),
        "launches",
    )


def _bytes(value: float | None) -> str:
    if value is None:
        return "–"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{figure(value / size)} {unit}"
    return f"{value:.0f} B"


def _flops(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{figure(value / size)} {unit}"
    return f"{value:,.0f}"
