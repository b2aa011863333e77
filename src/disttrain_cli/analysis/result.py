"""What an analysis says: the keys of `disttrain analyze --json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from disttrain_cli.spec.drift import Drift
from disttrain_cli.spec.files import Strict


class JobSummary(Strict):
    """The job as a whole, over the measured steps; null is what the traces cannot tell."""

    run: str = Field(description="Name of the last start that was analysed.")
    rehearsed: str | None = Field(description="How emulated devices stood for the cluster; null where none did.")
    layout: str | None = Field(
        description="Units with TP, DP and PP, in pipeline order; null for traces that do not name units."
    )
    ranks: int
    steps: int = Field(description="Steps recorded.")
    steps_measured: int = Field(description="Steps the figures are taken from.")
    warmup_steps_excluded: int
    iteration_s: float | None = Field(description="Mean time of a measured step; null where none was marked.")
    iteration_p50_s: float | None
    iteration_p95_s: float | None
    sequences_per_s: float | None
    mfu: float | None = Field(
        description="Model FLOPs ÷ (time × peak of the devices); a CPU's peak counts once."
    )
    bubble_fraction: float | None = Field(description="1 − compute ÷ (ranks × window of a step).")
    exposed_communication_fraction: float | None = Field(
        description="Share of the ranks' time that moves tensors while the rank "
        "computes nothing; waiting for a peer is not counted."
    )
    time_shares: dict[str, float] = Field(
        description="Where the ranks' time goes: compute and the kinds of bubble; empty where that is not known."
    )
    unclassified_fraction: float | None = Field(
        default=None,
        description="Share of the kernels' time that no evidence calls compute or communication (it counts as "
        "compute).",
    )


class UnitSummary(Strict):
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


class Stragglers(Strict):
    """Lost seconds per step by cause; null when no step could be replayed."""

    slowdown: float | None = Field(
        description="Recorded step ÷ ideal step, ideals within a unit. Of Kineto traces the ideal is compute alone."
    )
    ideal_s: float | None
    lost_s: dict[str, float] | None


class Place(Strict):
    """Where a cause lies; null where it does not apply."""

    unit: str | None = None
    stage: int | None = None
    replica: int | None = None
    rank: int | None = None
    host: str | None = None


class Evidence(Strict):
    """One measured figure behind a verdict."""

    what: str
    value: float
    unit: str


class Verdict(Strict):
    """What slows the job, how sure that is, and what to do."""

    cause: str = Field(description="A key of lost_s, 'none' (no straggler) or 'unknown' (could not be told).")
    headline: str
    place: Place
    lost_s: float = Field(description="Seconds per step that this cause costs.")
    confidence: float = Field(
        description="0 to 1: share of the steps that say the same, less what stays unexplained, and less where steps "
        "are few."
    )
    evidence: list[Evidence]
    advice: str
    next_command: str


class RankSummary(Strict):
    """Time of one rank over the measured steps, in the definitions of HolisticTraceAnalysis.

    Null is what a trace of another program does not tell: its ranks have no unit, stage and replica.
    """

    rank: int
    host: str | None
    unit: str | None
    stage: int | None
    replica: int | None
    span_us: float
    idle_us: float
    compute_us: float
    non_compute_us: float
    overlap_pct: float
    collective_wait_us: float
    last_to_arrive: int | None = Field(default=None, description="Collectives that this rank joined last.")
    communication_us: float | None = Field(default=None, description="|union of communication|.")
    exposed_communication_us: float | None = Field(
        default=None, description="Communication while this rank computes nothing, waiting for others included."
    )
    memory_peak_gib: float | None = Field(
        default=None, description="Most memory allocated on the device, where memory was traced."
    )


class CollectiveRow(Strict):
    """One collective, matched over ranks: who came last, and how long the others waited."""

    name: str
    group: str = Field(description="Process group as the trace names it, or 'stream' where it names none.")
    step: int | None
    index: int = Field(description="The how manieth of its group and name in the step, from 0.")
    ranks: int
    last_rank: int
    longest_wait_us: float
    mean_wait_us: float = Field(description="Mean over the ranks that waited.")
    transfer_us: float = Field(description="From the last arrival to the last end.")


class KernelRow(Strict):
    """All runs of one kernel, over the measured steps of all ranks."""

    name: str
    kind: str = Field(description="compute, communication, memory or unclassified.")
    count: int
    total_us: float
    longest_us: float
    share: float = Field(description="Of the time of all kernels, summed.")


class Comparison(Strict):
    """A prediction beside its measurement."""

    what: str
    unit: str | None = Field(description="Unit of the plan, or null for the job.")
    basis: str = Field(
        description="'plan': predicted before the run; 'same work': profile at the recorded sizes."
    )
    predicted: float
    measured: float
    measure: str = Field(description="Unit of both figures.")
    error_pct: float = Field(description="(measured − predicted) ÷ predicted.")


class OperationRow(Strict):
    """One operation, as planned, as the profile expects it for the recorded work, and as measured."""

    unit: str | None = Field(description="Unit of the plan, or null for the whole step.")
    stage: int | None = Field(description="Stage of the unit; of a transfer the one before the cut.")
    module: str | None
    operation: str = Field(
        description="forward, backward: mean per slot; transfer_*: one crossing without waiting, median; send_*: time "
        "that a rank takes to hand over; load: waiting for data; reduce, step: without waiting for other ranks; "
        "iteration: the whole step."
    )
    planned: float | None = Field(description="What the plan expected of mean data, where it says.")
    predicted: float = Field(description="What the profile expects for the work that was recorded.")
    measured: float
    measure: str = Field(description="Unit of the three figures.")
    error_pct: float | None = Field(description="(measured − predicted) ÷ predicted; null where no time is expected.")
    per_step: float = Field(description="How often one rank does it, or waits for it, in a step.")
    share_of_step: float = Field(description="Time of all of them on one rank ÷ time of the step.")

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


class MemoryRow(Strict):
    """Memory of the fullest rank of a stage."""

    unit: str
    stage: int
    measured_gib: float = Field(
        description="The most that it held for its stage; on a CPU the growth of its process, which is never less."
    )
    predicted_gib: float | None = Field(
        description="Peak that the plan expects at the worst sequence; null where unknown."
    )
    limit_gib: float | None


class Part(Strict):
    """One kernel, or operator of a CPU, inside an operation of ours."""

    name: str
    kind: str
    count: float = Field(description="Mean runs in one operation.")
    share: float = Field(description="Of the operation's time.")


class InsideRow(Strict):
    """What the time of an operation is made of, by torch's profile of some steps (train --profile-steps)."""

    unit: str
    stage: int
    module: str | None
    operation: str
    ranks: int = Field(description="Ranks whose profiles were read: one or a few of a stage.")
    count: int = Field(description="Operations that were profiled.")
    profiled_ms: float = Field(description="Mean of them; the profiler itself takes a part.")
    usual_ms: float | None = Field(description="Mean over the measured steps; null where none is.")
    shares: dict[str, float] = Field(
        description="Of its time: gemm, attention, convolution, normalization, communication, copies, other; and idle, "
        "while no kernel ran (on a CPU: no operator)."
    )
    top: list[Part] = Field(description="What takes most.")


class Slowest(Strict):
    """The slowest stage, replica or slot against the mean of its kind."""

    kind: str
    unit: str | None
    number: int
    mean_ms: float
    ratio: float = Field(description="Time over the mean of its unit (slots: of all slots).")
    normalised_ratio: float | None = Field(description="The same after dividing by the time its work predicts.")


class WhatIf(Strict):
    """Slowdowns in the published study's definition (ideals over all stages alike)."""

    slowdown: float
    by_stage: dict[str, float] = Field(description="By depth in the pipeline.")
    by_replica: dict[str, float]
    by_operation: dict[str, float]
    worst_workers_share: float | None = Field(
        description="M_W: share of the loss regained by fixing the slowest 3 % of ranks."
    )
    last_stage_share: float | None = Field(description="M_S: the same for the last stage.")


class HostClock(Strict):
    """What the clock of a host shows more than the reference's, the host of rank 0; null where nothing ties them."""

    host: str
    offset_us: float | None = Field(description="At the start of the trace.")
    drift_ppm: float | None = Field(description="By how much faster it runs; 0 where one offset explains all messages.")
    error_us: float | None = Field(description="The true offset is this far away at most: half of what is left open.")
    applied: bool = Field(description="Whether its times were shifted: where a message would else arrive too early.")


class Analysis(Strict):
    """Everything `disttrain analyze` found; lists that a format cannot fill are empty."""

    format: Literal["disttrain", "kineto", "operations"] = Field(
        description="What was read: own traces, Kineto/Chrome JSON, or operations of the straggler study's form."
    )
    job: JobSummary
    units: list[UnitSummary]
    stragglers: Stragglers
    verdict: Verdict
    ranks: list[RankSummary]
    what_if: WhatIf | None = Field(description="Null when no step could be replayed.")
    predicted_vs_measured: list[Comparison]
    operations: list[OperationRow] = Field(description="Prediction and measurement by operation, largest error first.")
    drift: list[Drift] = Field(description="What of the data has moved away from what the plan was made for.")
    slowest: list[Slowest]
    clocks: list[HostClock] = Field(default=[], description="Clocks of the hosts, where there are several.")
    inside: list[InsideRow] = Field(default=[], description="By operation; empty where torch profiled no step.")
    memory: list[MemoryRow] = Field(default=[], description="By stage; empty where memory was not recorded.")
    collectives: list[CollectiveRow] = Field(
        default=[], description="Kineto: collectives of all ranks, those that cost most waiting first."
    )
    kernels: list[KernelRow] = Field(default=[], description="Kineto: the kernels that take most time.")
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return self.model_dump(mode="json")
