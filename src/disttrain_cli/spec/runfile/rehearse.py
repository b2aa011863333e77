"""`rehearse`: emulated devices, their noise and their faults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.runfile.bounds import MOST_GPUS, MOST_STEPS
from disttrain_cli.spec.runfile.data import DistributionSpec


class FaultSpec(Strict):
    """Slow-down relative to the profile that a rehearsal injects."""

    slow: Literal["rank", "stage", "link", "worker", "host", "node"] = Field(
        description="rank: one replica of a stage computes slower; stage: all of them do; link:"
        " messages that leave the stage, and their gradients, take longer; worker: the data of a"
        " unit's replicas take longer to prepare; host: one replica of a stage starts its"
        " operations with a delay, so that they take longer including the wait; node: all devices"
        " of a node of the cluster compute slower, whatever the plan assigns to them."
    )
    unit: str | None = Field(None, description="Unit of the plan; needed for all except node.")
    node: int | None = Field(
        None, ge=0, le=MOST_GPUS, description="node: index of the node, from 0."
    )
    stage: int = Field(0, ge=0, le=MOST_GPUS, description="Stage of the unit; not used for worker.")
    replica: int | None = Field(
        None,
        ge=0,
        le=MOST_GPUS,
        description="rank, host, worker: the replica; for worker, all by default.",
    )
    cp_rank: int | None = Field(
        None,
        ge=0,
        le=MOST_GPUS,
        description="rank: rank within the replica's CP group, for which the others wait; by"
        " default all of them.",
    )
    factor: float = Field(ge=1e-3, le=1e6, description="Factor by which it takes longer.")
    from_step: int = Field(0, ge=0, le=MOST_STEPS, description="First step with the fault.")

    @model_validator(mode="after")
    def _one_rank(self) -> FaultSpec:
        if (self.slow == "node") != (self.node is not None) or (self.unit is None) != (
            self.slow == "node"
        ):
            raise ValueError(
                "a slow node needs node: its number, and no unit; anything else slow needs unit,"
                " and no node"
            )
        if self.slow in ("rank", "host") and self.replica is None:
            raise ValueError(
                f"a slow {self.slow} needs replica: the number of the replica of its stage"
            )
        if self.slow != "rank" and self.cp_rank is not None:
            raise ValueError(f"a slow {self.slow} has no cp_rank: a slow rank has")
        if self.slow in ("stage", "link", "node") and self.replica is not None:
            raise ValueError(f"a slow {self.slow} has no replica: it is all of them")
        return self


class LostSpec(Strict):
    """Node that a rehearsal loses for good: the processes of its devices die, in every start."""

    node: int = Field(ge=0, le=MOST_GPUS, description="Index of the node, from 0.")
    step: int = Field(ge=0, le=MOST_STEPS, description="First step that the node does not finish.")


class RehearseSpec(Strict):
    """Emulation of the cluster in `disttrain train --rehearse`."""

    steps: int = Field(
        3, ge=1, le=MOST_STEPS, description="Number of optimizer steps without --steps."
    )
    time_scale: Annotated[float, Field(gt=0, le=1e6)] | Literal["auto"] = Field(
        "auto",
        description="Seconds of the rehearsal per second of the cluster; auto: slow enough for"
        " this machine to keep up.",
    )
    gpus_per_process: Annotated[int, Field(ge=1, le=MOST_GPUS)] | Literal["auto"] = Field(
        "auto",
        description="Number of GPUs of one stage that each process emulates, in whole TP groups;"
        " auto: the smallest number with at most 24 processes.",
    )
    messages: Literal["scaled", "real"] = Field(
        "scaled",
        description=("Size of the messages: one value per row of a tensor, or the whole tensor."),
    )
    noise: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Standard deviation of an operation's time, relative to its mean.",
    )
    faults: list[FaultSpec] = Field(
        default_factory=list, description="Injected faults: slow devices, links, hosts."
    )
    lost: list[LostSpec] = Field(default_factory=list, description="Nodes that fail.")
    distribution: DistributionSpec | None = Field(
        None,
        description="Sizes of different data than the plan is for; by default those of the run.",
    )
