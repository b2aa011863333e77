"""Predicted times, memory and messages of a layout."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from disttrain_cli.spec.files import Strict

#: Origin of a figure: measured by this project, stated by a catalogue or by others, assumed.
Basis = Literal["measured", "stated", "assumed"]
#: Components of the peak memory of a stage; "NAME_gib" each.
PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "transient",
    "messages",
    "fragmentation",
    "reserve",
)


class StageMemory(Strict):
    """Peak memory of a rank of one stage, with its components."""

    unit: str
    stage: int
    peak_gib: float
    limit_gib: float
    weights_gib: float = 0.0
    gradients_gib: float = 0.0
    optimizer_gib: float = 0.0
    activations_gib: float = Field(
        0.0, description="Activations of the slots in flight at the peak."
    )
    transient_gib: float = Field(
        0.0, description="Further memory of the layer that runs at the peak."
    )
    messages_gib: float = Field(0.0, description="Buffers of sends that have not completed.")
    fragmentation_gib: float = Field(
        0.0,
        description="Allocator fragmentation, a share of the three components before it; stated,"
        " not measured.",
    )
    reserve_gib: float = Field(
        0.0, description="The device's context, libraries and communicators; stated, not measured."
    )

    @property
    def moving_gib(self) -> float:
        """Memory that grows with the work of a slot."""
        return (
            self.activations_gib + self.transient_gib + self.messages_gib + self.fragmentation_gib
        )

    @property
    def parts(self) -> dict[str, float]:
        """Components of the peak, by name."""
        return {name: getattr(self, f"{name}_gib") for name in PARTS}


class StageTime(Strict):
    """Predicted times of one stage for one slot in ms, mean over slots and replicas."""

    unit: str
    stage: int
    forward_ms: float
    backward_ms: float = Field(description="Without weight gradients if the backward is split.")
    weights_ms: float = 0.0
    mfu: float = Field(
        description="FLOPs of the stage ÷ peak of its devices over the whole iteration."
    )


class UnitTime(Strict):
    """Predicted times of one unit for one slot, in ms."""

    unit: str
    forward_ms: float
    backward_ms: float = Field(description="Without weight gradients if the backward is split.")
    weights_ms: float = 0.0
    stage_ms: float = Field(
        description="Forward and complete backward of the slowest rank: the cost of one"
        " additional slot."
    )
    sharing: float = Field(
        1.0,
        description="Expected time in the run ÷ these times: 1 on separate devices; below 1 if"
        " ranks share cores and do not all compute at once.",
    )
    mfu: float = Field(
        0.0, description="FLOPs of the unit ÷ peak of its devices over the whole iteration."
    )


class Traffic(Strict):
    """Messages of one kind in one step."""

    kind: Literal[
        "between_units",
        "between_stages",
        "gradients",
        "weights",
        "tensor_parallel",
        "context_parallel",
        "expert_parallel",
    ] = Field(
        description="Kind: activations and their gradients between units or stages; gradient"
        " reduction and gathering of updated weights over replicas; reductions of a TP group;"
        " communication of a CP group; rows exchanged by an EP group."
    )
    unit: str
    to: str | None = Field(None, description="Other unit, for traffic between units.")
    inside_a_node: bool = Field(description="Links used: inside a node or between nodes.")
    job_gib: float = Field(description="Total bytes that all ranks send or reduce.")
    rank_gib: float = Field(description="Bytes over the link of the busiest rank.")
    rank_s: float = Field(description="Time of these bytes at the bandwidth of the link.")


class PreprocessNeed(Strict):
    """Throughput that CPU nodes must deliver so that training never waits."""

    sequences_per_s: float
    images_per_s: float = Field(
        description="Number of decoded images, input images and images to generate."
    )
    cores: int
    hosts: int = Field(
        description="Number of preprocessing nodes with cluster.cpu_node_cores cores."
    )


class Prediction(Strict):
    """Predicted performance of a layout: the simulated mean over a few sampled global batches.

    The batches have the data's sizes.
    """

    layout: str | None = Field(None, description="Fingerprint of the predicted layout.")
    ordering: Literal["none", "paper", "best"] | None = Field(
        None, description="Policy that ordered the simulated steps."
    )
    iteration_s: float = Field(
        gt=0,
        description="Step time at the costs of the profile, by which layouts are ranked and"
        " compared.",
    )
    balanced_s: float | None = Field(
        None,
        description="The same step simulated with equally many rows at all experts; `iteration_s`"
        " has the skew of routing. None without expert parallelism.",
    )
    routing_quantile: float | None = Field(
        None,
        description="Probability with which the memory of a stage is enough for the fullest rank"
        " of an EP group; None without expert parallelism.",
    )
    expected_s: float | None = Field(
        None,
        description="The same step simulated at the expected costs, which include what profiles"
        " leave out (`doubts`); None if not simulated.",
    )
    range_s: tuple[float, float] | None = Field(
        None,
        description="Range from the costs of the profile, minus the measured error of the fits, to"
        " the pessimistic costs.",
    )
    doubts: dict[str, Basis] = Field(
        default_factory=dict,
        description="Items that expected and pessimistic costs add to the profile, with their"
        " basis (`templates/doubts.yaml`).",
    )
    sequences_per_s: float = Field(gt=0, description="Throughput for `iteration_s`.")
    mfu: float = Field(
        description="MFU for `iteration_s` over all devices, including those that the plan leaves"
        " idle. Model FLOPs as counted by PaLM and torchtitan: forward and backward, full causal"
        " attention, nothing for recomputation."
    )
    mfu_causal: float | None = Field(
        None,
        description=("The same with half of the LLM's attention, as causal kernels compute it."),
    )
    mfu_used: float | None = Field(None, description="MFU over the devices that the plan uses.")
    warmup_s: float
    steady_s: float
    bubble_fraction: float
    memory: list[StageMemory]
    units: list[UnitTime] = Field(default_factory=list)
    stages: list[StageTime] = Field(default_factory=list)
    reduce_s: float = Field(
        0.0, description="Longest gradient reduction of a stage, without overlap."
    )
    optimizer_s: float = Field(
        0.0,
        description="Longest optimizer step with gathering of updated weights, without overlap.",
    )
    exposed_reduce_s: float | None = Field(
        None, description="Exposed reduction: the longest part after a stage's last pass."
    )
    exposed_optimizer_s: float | None = Field(
        None,
        description="Exposed optimizer step and gathering: the longest part before a first"
        " forward.",
    )
    kernel_mfu: dict[str, float] = Field(
        default_factory=dict,
        description="MFU by module while a rank computes it, as executed in this plan (with TP"
        " messages and recomputation).",
    )
    orchestration_efficiency: float = Field(
        0.0, description=("MFU ÷ MFU if no device ever waited: ΣFLOPs / Σ(FLOPs / kernel MFU).")
    )
    memory_binds: str | None = Field(
        None, description="Unit and stage with the highest memory use, as 'unit stage 0'."
    )
    traffic: list[Traffic] = Field(default_factory=list)
    preprocess: PreprocessNeed | None = None
