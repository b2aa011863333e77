"""Sections on devices and launches, for Kineto traces; empty text if an analysis has none."""

from __future__ import annotations

from html import escape

from disttrain_cli.analysis.figures import counted
from disttrain_cli.analysis.report.charts import share_bar
from disttrain_cli.analysis.report.words import (
    figure,
    folded,
    kernel,
    percent,
    seconds,
    section,
    table,
)
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
    rows = [
        [
            escape(row.kind),
            str(row.ranks),
            f"{row.count:,}",
            _bytes(row.bytes_p50),
            *(
                seconds(value / 1e6)
                for value in (
                    row.transfer_p50_us,
                    row.transfer_p95_us,
                    row.transfer_max_us,
                    row.wait_p50_us,
                    row.wait_p95_us,
                    row.wait_max_us,
                )
            ),
            "–" if row.bus_gbytes_s is None else f"<b>{figure(row.bus_gbytes_s)}</b> GB/s",
        ]
        for row in analysis.collective_kinds[:MOST_ROWS]
    ]
    return (
        section(
            "Collectives by kind",
            "Transfer: from the last arrival to the last end. Wait: of the rank that waited "
            "longest. Bandwidth: median bus bandwidth as defined by nccl-tests (busbw).",
            table(
                [
                    "Kind",
                    "Ranks",
                    "Count",
                    "Bytes per rank",
                    "Transfer p50",
                    "p95",
                    "longest",
                    "Wait p50",
                    "p95",
                    "longest",
                    "Bandwidth",
                ],
                rows,
                label="Collectives by kind",
            ),
            "collective-kinds",
        )
        if rows
        else ""
    )


def operators(analysis: Analysis) -> str:
    """Show FLOPs of operators, and their share of the device's roof."""
    rows = [
        [
            kernel(row.name),
            f'<span class="shapes">{escape(row.shapes)}</span>',
            escape(row.dtype or "–"),
            f"{row.count:,}",
            seconds(row.total_us / 1e6),
            percent(row.share),
            _flops(row.flops),
            "–" if row.tflops is None else f"<b>{figure(row.tflops)}</b>",
            figure(row.flops_per_byte),
            "–" if row.roof_tflops is None else figure(row.roof_tflops),
            (
                "–"
                if row.roof_tflops is None or row.tflops is None
                else percent(row.tflops / row.roof_tflops)
            ),
            row.bound or "–",
        ]
        for row in analysis.operators[: 4 * MOST_ROWS]
    ]
    head = [
        "Operator",
        "Shapes",
        "Type",
        "Calls",
        "Total",
        "Share of compute",
        "FLOPs per call",
        "TFLOP/s",
        "FLOPs per byte",
        "Roof",
        "Share of roof",
        "Bound by",
    ]
    unknown = (
        ""
        if any(row.roof_tflops is not None for row in analysis.operators)
        else (
            " The roof is unknown: the catalogue lacks this device or its figures for these types."
        )
    )
    rest = (
        folded(f"{len(rows) - SHOWN} more", table(head, rows[SHOWN:])) if len(rows) > SHOWN else ""
    )
    return (
        section(
            "FLOPs by operator",
            "FLOPs from the recorded shapes ÷ time of the kernels that each operator launches. The"
            " roof is the smaller of the device’s peak and its memory bandwidth times the FLOPs per"
            " byte (fp32 without TF32)." + unknown,
            table(head, rows[:SHOWN], label="FLOPs by operator") + rest,
            "operators-flops",
        )
        if rows
        else ""
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
    rows = [
        [
            kernel(part.name),
            escape(part.kind),
            str(part.rank),
            f"{part.count:,}",
            seconds(part.us / 1e6),
            percent(part.share),
        ]
        for part in path.parts
    ]
    step = "everything recorded" if path.step is None else f"step {path.step}"
    return section(
        "Critical path",
        f"Of {step}: {seconds(path.length_us / 1e6)}, traced back from the last kernel through its"
        f" dependencies on hosts and ranks. It runs through {ranks}.",
        bar
        + folded(
            f"Parts ({len(rows)})",
            table(["Kernel", "Kind", "Rank", "Count", "On the path", "Share"], rows),
        ),
        "critical-path",
    )


def launches(analysis: Analysis) -> str:
    """Show launches of the hosts, and queues of the devices."""
    rows = [
        [
            str(row.rank),
            f"{row.launched:,}",
            f"{row.short:,}",
            percent(row.short / row.launched),
            *(
                f"{figure(value)} µs"
                for value in (
                    row.kernel_p50_us,
                    row.call_p50_us,
                    row.delay_p50_us,
                    row.delay_p95_us,
                    row.delay_max_us,
                )
            ),
        ]
        for row in analysis.launches[: 4 * MOST_ROWS]
    ]
    queues = [
        [
            str(row.rank),
            str(row.stream),
            f"{row.kernels:,}",
            figure(row.mean),
            str(row.longest),
            percent(row.empty_share),
        ]
        for row in analysis.queues[: 4 * MOST_ROWS]
    ]
    if not rows:
        return ""
    head = [
        "Rank",
        "Launched",
        "Shorter than their launch",
        "Share",
        "Kernel p50",
        "Call p50",
        "Delay p50",
        "p95",
        "longest",
    ]
    return section(
        "Launches",
        "Kernels, copies and fills; the delay is from the end of the call to the start on the"
        " device. Many kernels that are shorter than the call that launches them, and an empty"
        " queue, mean that the job is bound by the host.",
        table(head, rows[:SHOWN], label="Launches")
        + (
            folded(counted(len(rows) - SHOWN, "more rank"), table(head, rows[SHOWN:]))
            if len(rows) > SHOWN
            else ""
        )
        + folded(
            f"Queues of the streams ({len(queues)})",
            table(["Rank", "Stream", "Kernels", "Mean length", "Longest", "Empty"], queues),
        ),
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
