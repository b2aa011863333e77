"""What an analysis says: the keys of `disttrain analyze --json`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from disttrain_cli.data.drift import Drift
from disttrain_cli.spec.files import Strict


class JobSummary(Strict):
    """The job as a whole, over the measured steps."""

    run: str = Field(description="Name of the last start that was analysed.")
    rehearsed: str | None = Field(description="How emulated devices stood for the cluster; null where none did.")
    layout: str = Field(description="Units with TP, DP and PP, in pipeline order.")
    ranks: int
    steps: int = Field(description="Steps recorded.")
    steps_measured: int = Field(description="Steps the figures are taken from.")
    warmup_steps_excluded: int
    iteration_s: float = Field(description="Mean time of a measured step.")
    iteration_p50_s: float
    iteration_p95_s: float
    sequences_per_s: float | None
    mfu: float | None = Field(
        description="Model FLOPs ÷ (time × peak of the devices); a CPU's peak counts once."
    )
    bubble_fraction: float = Field(description="1 − compute ÷ (ranks × window of a step).")
    exposed_communication_fraction: float = Field(
        description="Share of the ranks' time that moves tensors while the rank "
        "computes nothing; waiting for a peer is not counted."
    )
    time_shares: dict[str, float] = Field(
        description="Where the ranks' time goes: compute and the kinds of bubble."
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

    slowdown: float | None = Field(description="Recorded step ÷ ideal step, ideals within a unit.")
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
        description="0 to 1: share of the steps that say the same, less what stays unexplained."
    )
    evidence: list[Evidence]
    advice: str
    next_command: str


class RankSummary(Strict):
    """Time of one rank over the measured steps, in the definitions of HolisticTraceAnalysis."""

    rank: int
    host: str
    unit: str
    stage: int
    replica: int
    span_us: float
    idle_us: float
    compute_us: float
    non_compute_us: float
    overlap_pct: float
    collective_wait_us: float


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


class Analysis(Strict):
    """Everything `disttrain analyze` found."""

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
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return self.model_dump(mode="json")
