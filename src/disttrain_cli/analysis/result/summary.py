"""Top level of an analysis."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct

from disttrain_cli.analysis.result.devices import (
    CollectiveKind,
    CriticalPath,
    LaunchRow,
    OperatorRow,
    QueueRow,
)
from disttrain_cli.analysis.result.rows import (
    CollectiveRow,
    Comparison,
    ExpertRow,
    HostClock,
    InsideRow,
    KernelRow,
    MemoryRow,
    OperationRow,
    RankSummary,
    Slowest,
)
from disttrain_cli.analysis.result.verdicts import Cause, Remedy, Stragglers, Verdict, WhatIf
from disttrain_cli.spec.drift import Drift
from disttrain_cli.spec.learning import Learning
from disttrain_cli.spec.meta import doc

#: Times outside of these (2000 to 2200) do not count from 1970.
_DATED_NS = (946_684_800 * 10**9, 7_258_118_400 * 10**9)


class JobSummary(Struct, frozen=True, kw_only=True):
    """The job as a whole, over the measured steps; null is what the traces lack."""

    run: Annotated[str, doc("Name of the analysed start of the job.")]
    name: Annotated[
        str, doc("Name of the run's folder, or of the folder or files of the traces.")
    ] = ""
    recorded_at: Annotated[
        str | None,
        doc("Start of the first recorded step, UTC; null if times do not count from 1970."),
    ] = None
    rehearsed: Annotated[
        str | None, doc("How emulated devices represented the cluster; null without a rehearsal.")
    ]
    layout: Annotated[
        str | None,
        doc("Units with TP, DP and PP, in pipeline order; null for traces without units."),
    ]
    ranks: int
    steps: Annotated[int, doc("Number of recorded steps.")]
    steps_measured: Annotated[int, doc("Number of steps that the figures cover.")]
    warmup_steps_excluded: int
    iteration_s: Annotated[
        float | None, doc("Mean time of a measured step; null if no step is marked.")
    ]
    iteration_p50_s: float | None
    iteration_p95_s: float | None
    sequences_per_s: float | None
    mfu: Annotated[
        float | None, doc("Model FLOPs ÷ (time × peak of the devices); a CPU's peak counts once.")
    ]
    bubble_fraction: Annotated[float | None, doc("1 − compute ÷ (ranks × window of a step).")]
    exposed_communication_fraction: Annotated[
        float | None,
        doc(
            "Share of the ranks' time in communication not overlapped with compute; waiting for a"
            " peer is not counted."
        ),
    ]
    time_shares: Annotated[
        dict[str, float],
        doc(
            "Breakdown of the ranks' time: compute, and everything else by kind; empty if unknown."
        ),
    ]
    unclassified_fraction: Annotated[
        float | None,
        doc(
            "Share of the kernels' time that cannot be classified as compute or communication (it"
            " counts as compute)."
        ),
    ] = None


class UnitSummary(Struct, frozen=True, kw_only=True):
    """One unit; seconds are per step and rank."""

    name: str
    modules: list[str]
    tp: int
    cp: int
    dp: int
    pp: int
    gpus: int
    mfu: float | None
    busy_fraction: float
    model_tflop_per_step: float | None
    compute_s: float
    data_wait_s: float
    warmup_drain_s: float
    other_unit_s: float
    other_stage_s: float
    transfer_s: float
    update_s: float
    gap_s: float


class Analysis(Struct, frozen=True, kw_only=True):
    """Results of `disttrain analyze`; lists that a format cannot fill are empty."""

    format: Annotated[
        Literal["disttrain", "kineto", "operations"],
        doc(
            "Format of the traces: disttrain's, Kineto/Chrome JSON, or operations in the format of"
            " the straggler study."
        ),
    ]
    job: JobSummary
    units: list[UnitSummary]
    stragglers: Stragglers
    verdict: Verdict
    ranks: list[RankSummary]
    what_if: Annotated[WhatIf | None, doc("Null if no step could be replayed.")]
    predicted_vs_measured: list[Comparison]
    operations: Annotated[
        list[OperationRow], doc("Prediction and measurement by operation, largest error first.")
    ]
    drift: Annotated[
        list[Drift], doc("Statistics of the data that differ from those that were planned for.")
    ]
    slowest: list[Slowest]
    causes: Annotated[
        list[Cause],
        doc(
            "Causes that slow a step by 1 % or more, the largest saving first; they include the"
            " verdict's cause, if it has one. Empty if no step could be replayed."
        ),
    ] = []
    remedies: Annotated[
        list[Remedy],
        doc("Savings of single changes, largest first; empty if no step could be replayed."),
    ] = []
    clocks: Annotated[list[HostClock], doc("Clocks of the hosts, where there are several.")] = []
    inside: Annotated[
        list[InsideRow], doc("By operation; empty if torch.profiler recorded no step.")
    ] = []
    memory: Annotated[list[MemoryRow], doc("By stage; empty if memory was not recorded.")] = []
    experts: Annotated[list[ExpertRow], doc("By layer; empty for models without experts.")] = []
    collectives: Annotated[
        list[CollectiveRow],
        doc(
            "Kineto: collectives of all ranks and messages (a send and its receive), sorted by"
            " waiting time, longest first."
        ),
    ] = []
    kernels: Annotated[
        list[KernelRow], doc("Kineto: the kernels with the largest total time.")
    ] = []
    collective_kinds: Annotated[
        list[CollectiveKind], doc("Kineto: all matched collectives, by kind.")
    ] = []
    operators: Annotated[
        list[OperatorRow],
        doc(
            "Kineto: operators with FLOPs and their position under the roofline, if shapes were"
            " recorded."
        ),
    ] = []
    launches: Annotated[list[LaunchRow], doc("Kineto: kernel launches of every rank's host.")] = []
    queues: Annotated[
        list[QueueRow], doc("Kineto: queue of launched kernels of every stream.")
    ] = []
    critical_path: Annotated[
        CriticalPath | None,
        doc("Kineto: of the step of median length; null without device events."),
    ] = None
    learning: Annotated[
        Learning | None, doc("Assessment of the loss curves; null if no losses were recorded.")
    ] = None
    warnings: list[str]

    @property
    def pipelined(self) -> bool:
        """True if ranks are known to be stages of a pipeline, whose idle time is a bubble."""
        return len({(rank.unit, rank.stage) for rank in self.ranks if rank.stage is not None}) > 1

    @property
    def not_computing(self) -> str:
        """Name of `job.bubble_fraction` in texts."""
        return "bubble" if self.pipelined else "not computing"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        document: dict[str, Any] = msgspec.to_builtins(self, enc_hook=plain)
        return document


def moment(since_1970_ns: int | None) -> str | None:
    """Format a time in UTC; None for times that do not count from 1970."""
    if since_1970_ns is None or not _DATED_NS[0] < since_1970_ns < _DATED_NS[1]:
        return None
    return datetime.fromtimestamp(since_1970_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number, for `msgspec`."""
    return value.item()
