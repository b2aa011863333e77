"""Rows of an analysis about ranks, operations, kernels and hosts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from disttrain_cli.spec.meta import doc


class RankSummary(Struct, frozen=True, kw_only=True):
    """Time of one rank over the measured steps, as HolisticTraceAnalysis defines it.

    Null is what a trace of another program lacks: its ranks have no unit, stage and replica.
    """

    rank: int
    host: str | None
    unit: str | None
    stage: int | None
    replica: int | None
    cp_rank: Annotated[int | None, doc("Null if the unit has no context parallelism.")] = None
    span_us: float
    idle_us: float
    compute_us: Annotated[float | None, doc("Null if most events cannot be classified.")]
    non_compute_us: Annotated[float | None, doc("Null if most events cannot be classified.")]
    overlap_pct: Annotated[float | None, doc("Null if the rank did not communicate.")]
    collective_wait_us: Annotated[
        float | None,
        doc(
            "Time from joining collectives (Kineto: and messages) until the last rank joins; null"
            " if none was matched."
        ),
    ]
    last_to_arrive: Annotated[
        int | None, doc("Collectives and messages that this rank joined last.")
    ] = None
    communication_us: Annotated[float | None, doc("|union of communication|.")] = None
    exposed_communication_us: Annotated[
        float | None,
        doc(
            "Communication not overlapped with compute on this rank, without waiting for others, as"
            " in job.exposed_communication_fraction."
        ),
    ] = None
    exposed_wait_us: Annotated[
        float | None,
        doc("Waiting for others in collectives and messages, not overlapped with compute."),
    ] = None
    memory_peak_gib: Annotated[
        float | None, doc("Peak memory allocated on the device, where memory was traced.")
    ] = None


class CollectiveRow(Struct, frozen=True, kw_only=True):
    """One collective or message, matched over ranks: the last rank, and the others' waiting."""

    name: str
    group: Annotated[
        str, doc("Name of the process group in the trace, or 'stream' if it has none.")
    ]
    step: int | None
    index: Annotated[int, doc("Ordinal within its group and name in the step, from 0.")]
    ranks: int
    last_rank: int
    longest_wait_us: float
    mean_wait_us: Annotated[float, doc("Mean over the ranks that waited.")]
    transfer_us: Annotated[float, doc("From the last arrival to the last end.")]


class KernelRow(Struct, frozen=True, kw_only=True):
    """All runs of one kernel, over the measured steps of all ranks."""

    name: str
    kind: Annotated[str, doc("compute, communication, memory or unclassified.")]
    count: int
    total_us: float
    longest_us: float
    share: Annotated[float, doc("Share of the summed time of all kernels.")]


class Comparison(Struct, frozen=True, kw_only=True):
    """A prediction and its measurement."""

    what: str
    unit: Annotated[str | None, doc("Unit of the plan; null for the job.")]
    basis: Annotated[
        str, doc("'plan': predicted before the run; 'same work': profile at the recorded sizes.")
    ]
    predicted: float
    measured: float
    measure: Annotated[str, doc("Unit of measurement of both figures.")]
    error_pct: Annotated[float, doc("(measured − predicted) ÷ predicted.")]


class OperationRow(Struct, frozen=True, kw_only=True):
    """One operation: planned, predicted by the profile for the recorded work, and measured."""

    unit: Annotated[str | None, doc("Unit of the plan; null for the whole step.")]
    stage: Annotated[int | None, doc("Stage of the unit; for a transfer, the sending stage.")]
    module: str | None
    operation: Annotated[
        str,
        doc(
            "forward, backward: mean per slot; transfer_*: one crossing without waiting, median;"
            " send_*: time that a send occupies the rank; load: waiting for data; reduce, step:"
            " without waiting for other ranks; iteration: the whole step."
        ),
    ]
    planned: Annotated[float | None, doc("Prediction of the plan for mean data, if it has one.")]
    predicted: Annotated[float, doc("Prediction of the profile for the recorded work.")]
    measured: float
    measure: Annotated[str, doc("Unit of measurement of the three figures.")]
    error_pct: Annotated[
        float | None, doc("(measured − predicted) ÷ predicted; null if the prediction is zero.")
    ]
    per_step: Annotated[float, doc("Executions, or waits, per rank and step.")]
    share_of_step: Annotated[float, doc("Their total time on one rank ÷ time of the step.")]

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
    "On a CPU, memory is the growth of the process, libraries and caches included: tensors are not"
    " counted separately. The plan counts the tensors of the stage for the worst sequence."
)


class MemoryRow(Struct, frozen=True, kw_only=True):
    """Memory of the rank of a stage that has most."""

    unit: str
    stage: int
    measured_gib: Annotated[
        float,
        doc(
            "Peak memory allocated for the stage; on a CPU, the growth of the process, which is"
            " never less."
        ),
    ]
    predicted_gib: Annotated[
        float | None, doc("Peak that the plan predicts for the worst sequence; null if unknown.")
    ]
    limit_gib: float | None
    outside_gib: Annotated[
        float | None,
        doc(
            "Peak memory outside of torch's allocator on a device after the first step, other"
            " ranks' included if they share it; null on a CPU."
        ),
    ] = None
    reserve_gib: Annotated[
        float | None, doc("Memory that the plan reserves for it; null if unknown.")
    ] = None
    of_process: Annotated[bool, doc("True on a CPU, where the whole process is measured.")] = False


class Part(Struct, frozen=True, kw_only=True):
    """One kernel, or operator of a CPU, inside an operation of disttrain."""

    name: str
    kind: str
    count: Annotated[float, doc("Mean number of runs per operation.")]
    share: Annotated[float, doc("Share of the operation's time.")]


class InsideRow(Struct, frozen=True, kw_only=True):
    """Breakdown of an operation's time by torch's profile of some steps (`--profile-steps`)."""

    unit: str
    stage: int
    module: str | None
    operation: str
    ranks: Annotated[int, doc("Ranks whose profiles were read: one or a few of a stage.")]
    count: Annotated[int, doc("Number of profiled operations.")]
    profiled_ms: Annotated[float, doc("Mean of these operations, profiler overhead included.")]
    usual_ms: Annotated[float | None, doc("Mean over the measured steps; null if there are none.")]
    shares: Annotated[
        dict[str, float],
        doc(
            "Shares of the time: gemm, attention, convolution, normalization, communication,"
            " copies, other; and idle, while no kernel (on a CPU: no operator) ran."
        ),
    ]
    top: Annotated[list[Part], doc("Largest parts.")]


class ExpertRow(Struct, frozen=True, kw_only=True):
    """Rows of one layer that chose each of its experts, per step over all ranks."""

    module: str
    layer: Annotated[int, doc("Index of the layer in the model.")]
    rows: Annotated[list[float], doc("Mean rows of each expert in a step.")]
    load: Annotated[float, doc("Rows of the fullest expert ÷ mean of its layer.")]
    fullest: Annotated[int, doc("Index of the fullest expert.")]
    in_use: Annotated[
        float, doc("Number of equally full experts whose rows have the same entropy.")
    ]
    collapsed: Annotated[
        bool, doc("True if the rows choose few more experts than each of them needs.")
    ]


class Slowest(Struct, frozen=True, kw_only=True):
    """The slowest stage, replica or slot against the mean of its kind."""

    kind: str
    unit: str | None
    number: int
    mean_ms: float
    ratio: Annotated[float, doc("Time ÷ mean time in its unit (slots: of all slots).")]
    normalised_ratio: Annotated[
        float | None, doc("Same ratio for time ÷ predicted time of its work.")
    ]


class HostClock(Struct, frozen=True, kw_only=True):
    """Offset of a host's clock from the reference's, the host of rank 0; null if unconnected."""

    host: str
    offset_us: Annotated[float | None, doc("Offset at the start of the trace.")]
    drift_ppm: Annotated[
        float | None, doc("Drift: how much faster it runs; 0 if one offset explains all messages.")
    ]
    error_us: Annotated[
        float | None, doc("Bound on the error of the offset: half of the possible range.")
    ]
    applied: Annotated[
        bool,
        doc("True if its times were shifted, since messages would otherwise arrive too early."),
    ]
