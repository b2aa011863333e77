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
        description=(
            "rank: one replica of a stage computes slower; stage: all of them do; link: what leaves"
            " the stage, and its gradients, takes longer; worker: the data of a unit's replicas"
            " take longer to prepare; host: one replica of a stage begins its operations late, so"
            " that they take longer with the wait; node: all devices of a node of the cluster"
            " compute slower, whatever the plan has put there."
        )
    )
    unit: str | None = Field(None, description="Unit of the plan; all but node: needed.")
    node: int | None = Field(None, ge=0, le=MOST_GPUS, description="node: its number, from 0.")
    stage: int = Field(
        0, ge=0, le=MOST_GPUS, description="Stage of the unit; worker: does not matter."
    )
    replica: int | None = Field(
        None,
        ge=0,
        le=MOST_GPUS,
        description="rank, host, worker: the replica; none: all workers of it.",
    )
    cp_rank: int | None = Field(
        None,
        ge=0,
        le=MOST_GPUS,
        description="rank: the rank of the replica's CP group, for which the others wait; none: all"
        " of them.",
    )
    factor: float = Field(ge=1e-3, le=1e6, description="Times as long.")
    from_step: int = Field(0, ge=0, le=MOST_STEPS, description="The first step with it.")

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

    node: int = Field(ge=0, le=MOST_GPUS, description="Its number, from 0.")
    step: int = Field(ge=0, le=MOST_STEPS, description="The first step that it does not end.")


class RehearseSpec(Strict):
    """Emulation of the cluster in `disttrain train --rehearse`."""

    steps: int = Field(
        3, ge=1, le=MOST_STEPS, description="Optimizer steps, where --steps gives none."
    )
    time_scale: Annotated[float, Field(gt=0, le=1e6)] | Literal["auto"] = Field(
        "auto",
        description=(
            "Seconds here per second of the cluster; auto: slow enough for this machine to keep up."
        ),
    )
    gpus_per_process: Annotated[int, Field(ge=1, le=MOST_GPUS)] | Literal["auto"] = Field(
        "auto",
        description=(
            "GPUs of one stage for which a process stands, whole TP groups; auto: as few as make "
            "at most 24 processes."
        ),
    )
    messages: Literal["scaled", "real"] = Field(
        "scaled",
        description=(
            "Size of what ranks send each other: one value per row of a tensor, or all of it."
        ),
    )
    noise: float = Field(
        0.0, ge=0, le=1, description="Standard deviation of an operation's time, as a share of it."
    )
    faults: list[FaultSpec] = Field(
        default_factory=list, description="What goes wrong: slow devices, links, hosts."
    )
    lost: list[LostSpec] = Field(default_factory=list, description="Nodes that are lost.")
    distribution: DistributionSpec | None = Field(
        None,
        description="Sizes of other data than the plan was made for; the run's own if not given.",
    )
