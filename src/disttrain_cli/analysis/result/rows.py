"""Rows of an analysis about ranks, operations, kernels and hosts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class RankSummary(Struct, frozen=True, kw_only=True):
    """Time of one rank over the measured steps, as HolisticTraceAnalysis defines it.

    Null is what a trace of another program lacks: its ranks have no unit, stage and replica.
    """

    rank: int
    host: str | None
    unit: str | None
    stage: int | None
    replica: int | None
    cp_rank: Annotated[
        int | None, Meta(description="Null where its unit has no context parallelism.")
    ] = None
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
    """One collective or message, matched over ranks: the last rank, and the others' waiting."""

    name: str
    group: Annotated[
        str,
        Meta(description="Process group as the trace names it, or 'stream' where it names none."),
    ]
    step: int | None
    index: Annotated[
        int, Meta(description="Ordinal within its group and name in the step, from 0.")
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
    """A prediction and its measurement."""

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
    """One operation: planned, predicted by the profile for the recorded work, and measured."""

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
        """Location of the operation, in words."""
        if self.unit is None:
            return "job"
        of = f", {self.module}" if self.module not in (None, self.unit) else ""
        return f"{self.unit} stage {self.stage}{of}"

    @property
    def effect_ms(self) -> float:
        """Effect on the steps of its rank: measured − predicted, in ms per step."""
        return (self.measured - self.predicted) * self.per_step


#: Note of the tables of memory on rows that are `of_process`.
GROWN = (
    "Held is by how much the process grew, libraries and caches included: on a CPU no tensors are"
    " counted apart. The plan counts the stage's tensors at the worst sequence."
)


class MemoryRow(Struct, frozen=True, kw_only=True):
    """Memory of the rank of a stage that has most."""

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
    outside_gib: Annotated[
        float | None,
        Meta(
            description=(
                "Most that was in use on a device after the first step beyond torch's allocator;"
                " other ranks' too where they share it, null on a CPU."
            )
        ),
    ] = None
    reserve_gib: Annotated[
        float | None, Meta(description="What the plan reserves for that; null where unknown.")
    ] = None
    of_process: Annotated[
        bool, Meta(description="True on a CPU, where the whole process is measured.")
    ] = False


class Part(Struct, frozen=True, kw_only=True):
    """One kernel, or operator of a CPU, inside an operation of disttrain."""

    name: str
    kind: str
    count: Annotated[float, Meta(description="Mean runs in one operation.")]
    share: Annotated[float, Meta(description="Of the operation's time.")]


class InsideRow(Struct, frozen=True, kw_only=True):
    """Breakdown of an operation's time by torch's profile of some steps (`--profile-steps`)."""

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


class HostClock(Struct, frozen=True, kw_only=True):
    """Offset of a host's clock from the reference's, the host of rank 0; null if unconnected."""

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
