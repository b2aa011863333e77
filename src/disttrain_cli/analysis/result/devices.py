"""Rows of an analysis about devices and kernel launches, for Kineto traces."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from disttrain_cli.spec.meta import doc


class CollectiveKind(Struct, frozen=True, kw_only=True):
    """All collectives of one kind among equally many ranks; times are per collective."""

    kind: str
    ranks: int
    count: int
    bytes_p50: Annotated[
        float | None,
        doc("Bytes that a rank contributes; null if neither arguments nor shapes contain them."),
    ]
    transfer_p50_us: Annotated[float, doc("From the last arrival to the last end.")]
    transfer_p95_us: float
    transfer_max_us: float
    wait_p50_us: Annotated[float, doc("Longest wait of a rank for the last rank.")]
    wait_p95_us: float
    wait_max_us: float
    bus_gbytes_s: Annotated[
        float | None,
        doc(
            "Median bus bandwidth as defined by nccl-tests (busbw), independent of the number of"
            " ranks."
        ),
    ]


class OperatorRow(Struct, frozen=True, kw_only=True):
    """Calls of one operator with the same shapes: FLOPs, time, and share of the roofline."""

    name: str
    shapes: str
    dtype: str | None
    count: int
    total_us: Annotated[float, doc("Time of its kernels on all ranks; on a CPU, of the operator.")]
    share: Annotated[float, doc("Share of the time of all compute kernels.")]
    flops: Annotated[float, doc("FLOPs of one call, as executed.")]
    tflops: Annotated[float | None, doc("FLOPs ÷ time of its kernels, in TFLOP/s.")]
    flops_per_byte: Annotated[
        float | None, doc("FLOPs ÷ bytes of inputs and outputs, each counted once.")
    ]
    roof_tflops: Annotated[
        float | None,
        doc(
            "Roofline: the minimum of the peak and flops_per_byte × memory bandwidth; null for a"
            " device or data type that templates/hardware.yaml lacks."
        ),
    ]
    bound: Annotated[
        Literal["compute", "memory"] | None,
        doc("Bound by compute or memory, by the ridge point of the roofline."),
    ]


class LaunchRow(Struct, frozen=True, kw_only=True):
    """Kernel launches of a rank's host over the measured steps, as in HolisticTraceAnalysis."""

    rank: int
    launched: Annotated[int, doc("Kernels, copies and fills whose launch was recorded.")]
    short: Annotated[int, doc("Kernels that are shorter than the call that launched them.")]
    kernel_p50_us: float
    call_p50_us: Annotated[float, doc("Duration of the launching call.")]
    delay_p50_us: Annotated[float, doc("From the end of the call to the start on the device.")]
    delay_p95_us: float
    delay_max_us: float


class QueueRow(Struct, frozen=True, kw_only=True):
    """Queue of a stream: kernels that are launched and have not begun."""

    rank: int
    stream: int
    kernels: int
    mean: Annotated[float, doc("Mean length from the first launch to the last start.")]
    longest: int
    empty_share: Annotated[float, doc("Share of that time in which the queue was empty.")]


class PathPart(Struct, frozen=True, kw_only=True):
    """Part of the critical path of one kind, one rank and one name."""

    kind: Annotated[
        str,
        doc(
            "compute, communication, memory or unclassified: a kernel; host: its device waited for"
            " a launch; launch: from the call to the kernel's start, or between two kernels."
        ),
    ]
    rank: int
    name: str
    count: int
    us: float
    share: Annotated[float, doc("Share of the path.")]


class CriticalPath(Struct, frozen=True, kw_only=True):
    """The longest chain of a step, which must become shorter for the step to."""

    step: int | None
    length_us: Annotated[
        float, doc("From the start of the path to the end of the step's last kernel.")
    ]
    shares: Annotated[dict[str, float], doc("Shares of the path by kind.")]
    ranks: Annotated[dict[str, float], doc("Shares of the path by rank.")]
    parts: Annotated[list[PathPart], doc("Largest parts of the path.")]
