"""What an analysis says: the keys of `disttrain analyze --json`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from disttrain_cli.analysis.device_rows import (
    CollectiveKind,
    CriticalPath,
    LaunchRow,
    OperatorRow,
    QueueRow,
)
from disttrain_cli.spec.drift import Drift

#: A remedy that gains less of a step is not shown.
LEAST_GAIN_PCT = 1.0
#: Times outside of these (2000 to 2200) count from elsewhere than 1970.
_DATED_NS = (946_684_800 * 10**9, 7_258_118_400 * 10**9)


class JobSummary(Struct, frozen=True, kw_only=True):
    """The job as a whole, over the measured steps; null is what the traces cannot tell."""

    run: Annotated[str, Meta(description="Name of the last start that was analysed.")]
    name: Annotated[
        str, Meta(description="Name of the run's folder, or of the folder or files of the traces.")
    ] = ""
    recorded_at: Annotated[
        str | None,
        Meta(
            description=(
                "When the first recorded step began, UTC; null where the trace counts from another"
                " moment."
            )
        ),
    ] = None
    rehearsed: Annotated[
        str | None,
        Meta(description="How emulated devices stood for the cluster; null where none did."),
    ]
    layout: Annotated[
        str | None,
        Meta(
            description=(
                "Units with TP, DP and PP, in pipeline order; null for traces that do not name"
                " units."
            )
        ),
    ]
    ranks: int
    steps: Annotated[int, Meta(description="Steps recorded.")]
    steps_measured: Annotated[int, Meta(description="Steps the figures are taken from.")]
    warmup_steps_excluded: int
    iteration_s: Annotated[
        float | None, Meta(description="Mean time of a measured step; null where none was marked.")
    ]
    iteration_p50_s: float | None
    iteration_p95_s: float | None
    sequences_per_s: float | None
    mfu: Annotated[
        float | None,
        Meta(description="Model FLOPs ÷ (time × peak of the devices); a CPU's peak counts once."),
    ]
    bubble_fraction: Annotated[
        float | None, Meta(description="1 − compute ÷ (ranks × window of a step).")
    ]
    exposed_communication_fraction: Annotated[
        float | None,
        Meta(
            description=(
                "Share of the ranks' time that moves tensors while the rank computes nothing;"
                " waiting for a peer is not counted."
            )
        ),
    ]
    time_shares: Annotated[
        dict[str, float],
        Meta(
            description=(
                "Where the ranks' time goes: compute and the kinds of bubble; empty where that is"
                " not known."
            )
        ),
    ]
    unclassified_fraction: Annotated[
        float | None,
        Meta(
            description=(
                "Share of the kernels' time that no evidence calls compute or communication (it"
                " counts as compute)."
            )
        ),
    ] = None


class UnitSummary(Struct, frozen=True, kw_only=True):
    """One unit; seconds are per step and rank."""

    name: str
    modules: list[str]
    tp: int
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


class StepLosses(Struct, frozen=True, kw_only=True):
    """What one step lost."""

    step: int
    ideal_s: float
    step_s: float
    lost_s: dict[str, float]


class Stragglers(Struct, frozen=True, kw_only=True):
    """Lost seconds per step by cause, mean over the steps of `by_step`; null when no step could be
    replayed."""

    slowdown: Annotated[
        float | None,
        Meta(
            description=(
                "Recorded step ÷ ideal step, ideals within a unit. Of Kineto traces the ideal is"
                " compute alone."
            )
        ),
    ]
    ideal_s: float | None
    lost_s: dict[str, float] | None
    not_told: Annotated[
        list[str],
        Meta(
            description=(
                "Keys of lost_s of which these traces tell nothing: 0 there is no measurement."
            )
        ),
    ] = []
    by_step: Annotated[
        list[StepLosses],
        Meta(
            description=(
                "Every replayed step, at most 32 spread over the measured ones; empty for Kineto"
                " traces."
            )
        ),
    ] = []


class Place(Struct, frozen=True, kw_only=True):
    """Where a cause lies; null where it does not apply."""

    unit: str | None = None
    stage: int | None = None
    replica: int | None = None
    rank: int | None = None
    host: str | None = None


class Evidence(Struct, frozen=True, kw_only=True):
    """One measured figure behind a verdict."""

    what: str
    value: float
    unit: str

    @property
    def shown(self) -> tuple[float, str]:
        """Value and unit for people: shares in percent."""
        share = self.unit == "share" or self.unit.startswith("share of ")
        return (
            (100 * self.value, f"%{self.unit.removeprefix('share')}")
            if share
            else (self.value, self.unit)
        )


class Verdict(Struct, frozen=True, kw_only=True):
    """What slows the job, how sure that is, and what to do."""

    cause: Annotated[
        str,
        Meta(
            description="A key of lost_s, 'none' (no straggler) or 'unknown' (could not be told)."
        ),
    ]
    headline: str
    place: Place
    lost_s: Annotated[float, Meta(description="Seconds per step that this cause costs.")]
    confidence: Annotated[
        float,
        Meta(
            description=(
                "0 to 1: how often such evidence has been right on jobs whose cause was known"
                " (docs/analysis.md)."
            )
        ),
    ]
    evidence: list[Evidence]
    advice: str
    next_command: str


class Cause(Struct, frozen=True, kw_only=True):
    """Something that slows a step, by what mending it gains; none of them claims more than that."""

    cause: Annotated[
        str,
        Meta(description="A key of lost_s, or 'unknown': ranks without a trace are waited for."),
    ]
    place: Place
    places: Annotated[
        list[Place],
        Meta(
            description=(
                "Where several places gain only together, or lie in one row: each of them, that"
                " which adds most first."
            )
        ),
    ]
    told: Annotated[str, Meta(description="What it is, in words.")]
    gain_s: Annotated[
        float,
        Meta(
            description=(
                "Seconds of a step that mending it gains once the rows above it are mended; so the"
                " rows add up."
            )
        ),
    ]
    gain_pct: Annotated[float, Meta(description="Of the recorded step.")]
    alone_s: Annotated[
        float,
        Meta(
            description=(
                "What mending it gains with all else as recorded: less where another cause"
                " hides it."
            )
        ),
    ]
    confidence: Annotated[
        float, Meta(description="0 to 1: how sure it is that this gains 5 % of a step or more.")
    ]
    one_event: Annotated[
        bool,
        Meta(
            description=(
                "Whether it would gain less than 5 % of a step without one event of one step."
            )
        ),
    ]
    next_command: str


class RankSummary(Struct, frozen=True, kw_only=True):
    """Time of one rank over the measured steps, in the definitions of HolisticTraceAnalysis.

    Null is what a trace of another program does not tell: its ranks have no unit, stage and
    replica.
    """

    rank: int
    host: str | None
    unit: str | None
    stage: int | None
    replica: int | None
    span_us: float
    idle_us: float
    compute_us: Annotated[
        float | None, Meta(description="Null where most events are of no known kind.")
    ]
    non_compute_us: Annotated[
        float | None, Meta(description="Null where most events are of no known kind.")
    ]
    overlap_pct: Annotated[
        float | None, Meta(description="Null where the rank did not communicate.")
    ]
    collective_wait_us: Annotated[
        float | None,
        Meta(
            description=(
                "From joining collectives (Kineto: and messages) to their last member's arrival;"
                " null where none was matched."
            )
        ),
    ]
    last_to_arrive: Annotated[
        int | None, Meta(description="Collectives and messages that this rank joined last.")
    ] = None
    communication_us: Annotated[float | None, Meta(description="|union of communication|.")] = None
    exposed_communication_us: Annotated[
        float | None,
        Meta(
            description=(
                "Communication while this rank computes nothing, waiting for others left out, as in"
                " job.exposed_communication_fraction."
            )
        ),
    ] = None
    exposed_wait_us: Annotated[
        float | None,
        Meta(
            description=(
                "Waiting for others in collectives and messages while this rank computes nothing."
            )
        ),
    ] = None
    memory_peak_gib: Annotated[
        float | None,
        Meta(description="Most memory allocated on the device, where memory was traced."),
    ] = None


class CollectiveRow(Struct, frozen=True, kw_only=True):
    """One collective or message, matched over ranks: who came last, and how long the others
    waited."""

    name: str
    group: Annotated[
        str,
        Meta(description="Process group as the trace names it, or 'stream' where it names none."),
    ]
    step: int | None
    index: Annotated[
        int, Meta(description="The how manieth of its group and name in the step, from 0.")
    ]
    ranks: int
    last_rank: int
    longest_wait_us: float
    mean_wait_us: Annotated[float, Meta(description="Mean over the ranks that waited.")]
    transfer_us: Annotated[float, Meta(description="From the last arrival to the last end.")]


class KernelRow(Struct, frozen=True, kw_only=True):
    """All runs of one kernel, over the measured steps of all ranks."""

    name: str
    kind: Annotated[str, Meta(description="compute, communication, memory or unclassified.")]
    count: int
    total_us: float
    longest_us: float
    share: Annotated[float, Meta(description="Of the time of all kernels, summed.")]


class Comparison(Struct, frozen=True, kw_only=True):
    """A prediction beside its measurement."""

    what: str
    unit: Annotated[str | None, Meta(description="Unit of the plan, or null for the job.")]
    basis: Annotated[
        str,
        Meta(
            description=(
                "'plan': predicted before the run; 'same work': profile at the recorded sizes."
            )
        ),
    ]
    predicted: float
    measured: float
    measure: Annotated[str, Meta(description="Unit of both figures.")]
    error_pct: Annotated[float, Meta(description="(measured − predicted) ÷ predicted.")]


class OperationRow(Struct, frozen=True, kw_only=True):
    """One operation, as planned, as the profile expects it for the recorded work, and as
    measured."""

    unit: Annotated[str | None, Meta(description="Unit of the plan, or null for the whole step.")]
    stage: Annotated[
        int | None, Meta(description="Stage of the unit; of a transfer the one before the cut.")
    ]
    module: str | None
    operation: Annotated[
        str,
        Meta(
            description=(
                "forward, backward: mean per slot; transfer_*: one crossing without waiting,"
                " median; send_*: time that a rank takes to hand over; load: waiting for data;"
                " reduce, step: without waiting for other ranks; iteration: the whole step."
            )
        ),
    ]
    planned: Annotated[
        float | None, Meta(description="What the plan expected of mean data, where it says.")
    ]
    predicted: Annotated[
        float, Meta(description="What the profile expects for the work that was recorded.")
    ]
    measured: float
    measure: Annotated[str, Meta(description="Unit of the three figures.")]
    error_pct: Annotated[
        float | None,
        Meta(description="(measured − predicted) ÷ predicted; null where no time is expected."),
    ]
    per_step: Annotated[
        float, Meta(description="How often one rank does it, or waits for it, in a step.")
    ]
    share_of_step: Annotated[
        float, Meta(description="Time of all of them on one rank ÷ time of the step.")
    ]

    @property
    def place(self) -> str:
        """Where it happens, in words."""
        if self.unit is None:
            return "job"
        of = f", {self.module}" if self.module not in (None, self.unit) else ""
        return f"{self.unit} stage {self.stage}{of}"

    @property
    def effect_ms(self) -> float:
        """How much longer or shorter the steps of its rank are than predicted."""
        return (self.measured - self.predicted) * self.per_step


class MemoryRow(Struct, frozen=True, kw_only=True):
    """Memory of the fullest rank of a stage."""

    unit: str
    stage: int
    measured_gib: Annotated[
        float,
        Meta(
            description=(
                "The most that it held for its stage; on a CPU the growth of its process, which is"
                " never less."
            )
        ),
    ]
    predicted_gib: Annotated[
        float | None,
        Meta(description="Peak that the plan expects at the worst sequence; null where unknown."),
    ]
    limit_gib: float | None


class Part(Struct, frozen=True, kw_only=True):
    """One kernel, or operator of a CPU, inside an operation of ours."""

    name: str
    kind: str
    count: Annotated[float, Meta(description="Mean runs in one operation.")]
    share: Annotated[float, Meta(description="Of the operation's time.")]


class InsideRow(Struct, frozen=True, kw_only=True):
    """What the time of an operation is made of, by torch's profile of some steps (train
    --profile-steps)."""

    unit: str
    stage: int
    module: str | None
    operation: str
    ranks: Annotated[
        int, Meta(description="Ranks whose profiles were read: one or a few of a stage.")
    ]
    count: Annotated[int, Meta(description="Operations that were profiled.")]
    profiled_ms: Annotated[
        float, Meta(description="Mean of them; the profiler itself takes a part.")
    ]
    usual_ms: Annotated[
        float | None, Meta(description="Mean over the measured steps; null where none is.")
    ]
    shares: Annotated[
        dict[str, float],
        Meta(
            description=(
                "Of its time: gemm, attention, convolution, normalization, communication, copies,"
                " other; and idle, while no kernel ran (on a CPU: no operator)."
            )
        ),
    ]
    top: Annotated[list[Part], Meta(description="What takes most.")]


class Slowest(Struct, frozen=True, kw_only=True):
    """The slowest stage, replica or slot against the mean of its kind."""

    kind: str
    unit: str | None
    number: int
    mean_ms: float
    ratio: Annotated[
        float, Meta(description="Time over the mean of its unit (slots: of all slots).")
    ]
    normalised_ratio: Annotated[
        float | None, Meta(description="The same after dividing by the time its work predicts.")
    ]


class WhatIf(Struct, frozen=True, kw_only=True):
    """Slowdowns in the published study's definition (ideals over all stages alike)."""

    slowdown: float
    by_stage: Annotated[dict[str, float], Meta(description="By depth in the pipeline.")]
    by_replica: dict[str, float]
    by_operation: dict[str, float]
    worst_workers_share: Annotated[
        float | None,
        Meta(description="M_W: share of the loss regained by fixing the slowest 3 % of ranks."),
    ]
    last_stage_share: Annotated[float | None, Meta(description="M_S: the same for the last stage.")]


class Remedy(Struct, frozen=True, kw_only=True):
    """What one change would gain, everything else as recorded; gains of several do not add up."""

    cause: Annotated[str, Meta(description="The key of lost_s that it mends.")]
    change: Annotated[str, Meta(description="What would be different, in words.")]
    command: Annotated[str, Meta(description="The next command towards it.")]
    basis: Annotated[
        Literal["replay", "plan"],
        Meta(
            description=(
                "'replay': the recorded steps played again; 'plan': the planner's prediction less"
                " that of the present layout, both with the times of this run."
            )
        ),
    ]
    gpus: Annotated[int, Meta(description="Devices more than now.")]
    step_s: Annotated[
        float, Meta(description="The step then, mean over the steps that were replayed.")
    ]
    gain_s: float
    gain_pct: Annotated[float, Meta(description="Of the recorded step.")]
    at_most: Annotated[
        bool,
        Meta(description="Whether this is a limit that no ordering reaches: data are not cut."),
    ]

    @property
    def worth(self) -> bool:
        """Whether it gains enough to be shown and advised."""
        return self.gain_pct >= LEAST_GAIN_PCT


class HostClock(Struct, frozen=True, kw_only=True):
    """What the clock of a host shows more than the reference's, the host of rank 0; null where
    nothing ties them."""

    host: str
    offset_us: Annotated[float | None, Meta(description="At the start of the trace.")]
    drift_ppm: Annotated[
        float | None,
        Meta(description="By how much faster it runs; 0 where one offset explains all messages."),
    ]
    error_us: Annotated[
        float | None,
        Meta(description="The true offset is this far away at most: half of what is left open."),
    ]
    applied: Annotated[
        bool,
        Meta(
            description=(
                "Whether its times were shifted: where a message would else arrive too early."
            )
        ),
    ]


class Analysis(Struct, frozen=True, kw_only=True):
    """Everything `disttrain analyze` found; lists that a format cannot fill are empty."""

    format: Annotated[
        Literal["disttrain", "kineto", "operations"],
        Meta(
            description=(
                "What was read: own traces, Kineto/Chrome JSON, or operations of the straggler"
                " study's form."
            )
        ),
    ]
    job: JobSummary
    units: list[UnitSummary]
    stragglers: Stragglers
    verdict: Verdict
    ranks: list[RankSummary]
    what_if: Annotated[WhatIf | None, Meta(description="Null when no step could be replayed.")]
    predicted_vs_measured: list[Comparison]
    operations: Annotated[
        list[OperationRow],
        Meta(description="Prediction and measurement by operation, largest error first."),
    ]
    drift: Annotated[
        list[Drift],
        Meta(description="What of the data has moved away from what the plan was made for."),
    ]
    slowest: list[Slowest]
    causes: Annotated[
        list[Cause],
        Meta(
            description=(
                "What slows a step by 1 % or more, that which gains most first; the verdict's is"
                " among them, if it has one. Empty where no step could be replayed."
            )
        ),
    ] = []
    remedies: Annotated[
        list[Remedy],
        Meta(
            description=(
                "What single changes would gain, most first; empty where no step could be replayed."
            )
        ),
    ] = []
    clocks: Annotated[
        list[HostClock], Meta(description="Clocks of the hosts, where there are several.")
    ] = []
    inside: Annotated[
        list[InsideRow], Meta(description="By operation; empty where torch profiled no step.")
    ] = []
    memory: Annotated[
        list[MemoryRow], Meta(description="By stage; empty where memory was not recorded.")
    ] = []
    collectives: Annotated[
        list[CollectiveRow],
        Meta(
            description=(
                "Kineto: collectives of all ranks and messages (a send and its receive), those that"
                " cost most waiting first."
            )
        ),
    ] = []
    kernels: Annotated[
        list[KernelRow], Meta(description="Kineto: the kernels that take most time.")
    ] = []
    collective_kinds: Annotated[
        list[CollectiveKind], Meta(description="Kineto: all matched collectives, by kind.")
    ] = []
    operators: Annotated[
        list[OperatorRow],
        Meta(
            description=(
                "Kineto: operators with FLOPs and their place under the roofline, where shapes were"
                " recorded."
            )
        ),
    ] = []
    launches: Annotated[
        list[LaunchRow], Meta(description="Kineto: how the host of every rank launches kernels.")
    ] = []
    queues: Annotated[
        list[QueueRow], Meta(description="Kineto: what every stream had waiting to run.")
    ] = []
    critical_path: Annotated[
        CriticalPath | None,
        Meta(description="Kineto: of the step of median length; null for traces without a device."),
    ] = None
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        document: dict[str, Any] = msgspec.to_builtins(self, enc_hook=plain)
        return document


def moment(since_1970_ns: int | None) -> str | None:
    """Date and time in UTC; None for times that do not count from 1970."""
    if since_1970_ns is None or not _DATED_NS[0] < since_1970_ns < _DATED_NS[1]:
        return None
    return datetime.fromtimestamp(since_1970_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def plain(value: Any) -> Any:
    """A NumPy scalar as Python's own number, for `msgspec`."""
    return value.item()
