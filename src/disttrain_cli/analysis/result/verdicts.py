"""Verdict on a job, with its confidence, causes and remedies."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from disttrain_cli.spec.meta import doc

#: Remedies that save a smaller share of a step are not shown.
LEAST_GAIN_PCT = 1.0


class StepLosses(Struct, frozen=True, kw_only=True):
    """Lost seconds of one step by cause."""

    step: int
    ideal_s: float
    step_s: float
    lost_s: dict[str, float]


class Stragglers(Struct, frozen=True, kw_only=True):
    """Lost seconds per step by cause, mean over the steps of `by_step`.

    They are null if no step could be replayed.
    """

    slowdown: Annotated[
        float | None,
        doc(
            "Recorded step ÷ ideal step, with ideals per unit. For Kineto traces, the ideal is"
            " compute alone."
        ),
    ]
    ideal_s: float | None
    lost_s: dict[str, float] | None
    not_recorded: Annotated[
        list[str],
        doc("Keys of lost_s that these traces cannot show; their 0 is not a measurement."),
    ] = []
    by_step: Annotated[
        list[StepLosses],
        doc("Replayed steps: at most 32, spread over the measured ones; empty for Kineto traces."),
    ] = []


#: Fields in the name of a drawing's lane.
LANE = ("stage", "replica", "cp_rank", "rank")


class Place(Struct, frozen=True, kw_only=True):
    """Location of a cause; fields that do not apply are null."""

    unit: str | None = None
    stage: int | None = None
    replica: int | None = None
    cp_rank: Annotated[int | None, doc("Null if the unit has no context parallelism.")] = None
    rank: int | None = None
    host: str | None = None

    @property
    def named(self) -> str:
        """Unit, stage and replica of a rank, in words."""
        of_cp = "" if self.cp_rank is None else f", CP rank {self.cp_rank}"
        return f"{self.unit}, stage {self.stage}, replica {self.replica}{of_cp}"

    @property
    def lane(self) -> str:
        """Name of its lane in a drawing, below that of its unit."""
        of_cp = "" if self.cp_rank is None else f" · CP rank {self.cp_rank}"
        return f"stage {self.stage} · replica {self.replica}{of_cp} · rank {self.rank}"


class Evidence(Struct, frozen=True):
    """One measured figure behind a verdict."""

    what: str
    value: float
    unit: str

    @property
    def shown(self) -> tuple[float, str]:
        """Value and unit for texts: shares in percent."""
        share = self.unit == "share" or self.unit.startswith("share of ")
        if share:
            return (100 * self.value, f"%{self.unit.removeprefix('share')}")
        return (self.value, self.unit)


class Verdict(Struct, frozen=True, kw_only=True):
    """Cause that slows the job, with confidence, evidence and advice."""

    cause: Annotated[
        str,
        doc(
            "A key of lost_s; 'experts', the part of its worker due to the rows of experts; 'none'"
            " (no straggler) or 'unknown' (not determined)."
        ),
    ]
    headline: str
    place: Place
    lost_s: Annotated[float, doc("Seconds per step lost to this cause.")]
    lost_fraction: Annotated[
        float | None, doc("lost_s as a share of the step; null if no loss could be measured.")
    ] = None
    confidence: Annotated[
        float,
        doc(
            "0 to 1: how often a verdict with such evidence is right on jobs of known cause"
            " (docs/analysis.md)."
        ),
    ]
    evidence: list[Evidence]
    advice: str
    next_command: str


class Cause(Struct, frozen=True, kw_only=True):
    """A cause that slows a step, and an estimate of what fixing it saves, never more."""

    cause: Annotated[
        str,
        doc(
            "A key of lost_s; 'experts', the part of its worker due to the rows of experts; or"
            " 'unknown': others wait for ranks without traces."
        ),
    ]
    place: Place
    places: Annotated[
        list[Place],
        doc(
            "All ranks (or stages) of the row if it has several, for instance if only fixing them"
            " together helps; the largest contribution first."
        ),
    ]
    sentence: Annotated[str, doc("Description of the cause.")]
    gain_s: Annotated[
        float,
        doc(
            "Seconds of a step that fixing it saves after the rows above are fixed, so that rows"
            " add up."
        ),
    ]
    gain_pct: Annotated[float, doc("gain_s in percent of the recorded step.")]
    alone_s: Annotated[
        float, doc("Seconds that fixing only this cause saves: less if another cause hides it.")
    ]
    confidence: Annotated[float, doc("0 to 1: confidence that this saves 5 % of a step or more.")]
    one_event: Annotated[
        bool,
        doc(
            "True if a single event of one step accounts for it: without that event fixing it would"
            " save less than 5 % of a step."
        ),
    ]
    next_command: str


class WhatIf(Struct, frozen=True, kw_only=True):
    """Slowdowns in the published study's definition (ideals over all stages alike)."""

    slowdown: float
    by_stage: Annotated[dict[str, float], doc("By depth in the pipeline.")]
    by_replica: dict[str, float]
    by_operation: dict[str, float]
    worst_workers_share: Annotated[
        float | None, doc("M_W: share of the loss removed by fixing the slowest 3 % of ranks.")
    ]
    last_stage_share: Annotated[float | None, doc("M_S: the same for the last stage.")]


class Remedy(Struct, frozen=True, kw_only=True):
    """One change and its saving, everything else as recorded; savings do not add up."""

    cause: Annotated[str, doc("Key of lost_s that it reduces.")]
    change: Annotated[str, doc("Description of the change.")]
    command: Annotated[str, doc("Next command towards this change.")]
    basis: Annotated[
        Literal["replay", "plan"],
        doc(
            "'replay': replay of the recorded steps; 'plan': difference between the planner's"
            " predictions for the new and the present layout, with this run's times."
        ),
    ]
    gpus: Annotated[int, doc("Number of additional devices.")]
    step_s: Annotated[float, doc("Step time with the change, mean over the replayed steps.")]
    gain_s: float
    gain_pct: Annotated[float, doc("gain_s in percent of the recorded step.")]
    at_most: Annotated[
        bool, doc("True for an upper bound that no ordering reaches, as samples are not split.")
    ]

    @property
    def worth(self) -> bool:
        """True if it saves enough to be shown and advised."""
        return self.gain_pct >= LEAST_GAIN_PCT
