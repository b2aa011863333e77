"""Which stages of a plan differ, and what is found of each: the dry run's report."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from disttrain_cli.models.graph import LayerInfo, live_tensors
from disttrain_cli.spec.stage_graph import Stage, StageGraph

#: Name of the file with a double per process: the share of its work that is done.
PROGRESS = "progress"


class Message(BaseModel):
    """A state tensor as it crosses a cut in a slot."""

    instruction: str  # that sent or received it
    tensor: str
    shape: list[int]  # of this rank's rows
    dtype: str


class Wait(BaseModel):
    """Where the host waited for the device."""

    instruction: str  # "" = at the end of the step
    what: str  # an operator, or a copy
    where: str  # source line
    times: int  # in a step


class Failure(BaseModel):
    """Why a stage's step did not end."""

    what: str
    where: str  # source line


class OrderSeen(BaseModel):
    """What all ranks send, receive and join in a step, and whether every rank gets to its end."""

    slots: int
    operations: int
    faults: list[str]  # `runtime.messages.proof`


class StageSeen(BaseModel):
    """What one rank of a stage did in a step, and in its last slot."""

    stages: list[int]  # numbers of the stages that are alike
    rank: int
    slots_in_flight: int
    slots: int  # of the step that was taken
    kept_gib: float = 0.0  # from forward to backward, of a slot
    peak_gib: float = 0.0
    built_gib: float = 0.0  # most while the engine was built
    leaked_gib: float = 0.0  # alive after the step, and not before it
    kernels: int = 0  # of a slot, forward and backward
    host_operators: int = 0
    sends: int = 0
    send_gib: float = 0.0
    receives: int = 0
    receive_gib: float = 0.0
    collectives: int = 0
    collective_gib: float = 0.0
    devices: list[str] = []  # on which tensors of the stage lie
    messages: list[Message] = []
    waits: list[Wait] = []
    failure: Failure | None = None
    took_s: float = 0.0
    host_mib: float = 0.0  # memory of the process that tried it


def slots_in_flight(stage: Stage, microbatches: int) -> int:
    """Slots whose activations a stage keeps at a time, in DeepSpeed's 1F1B schedule."""
    return min(microbatches, stage.to_end)


def slots_seen(stage: Stage, microbatches: int) -> int:
    """Slots of a step in which a stage comes to keep all that it ever does: gradients of weights
    that wait are behind those of inputs by their delay."""
    flight = slots_in_flight(stage, microbatches)
    return min(microbatches, flight + 1 + (stage.weight_delay or 0))


def distinct(graph: StageGraph, table: Sequence[LayerInfo], microbatches: int) -> list[list[Stage]]:
    """Stages in groups that do the same: equal layers, tensors over their cuts, slots in flight,
    delays and neighbours."""
    groups: dict[tuple[object, ...], list[Stage]] = {}
    for stage in graph.stages:
        layers = tuple((table[number].module, table[number].kind) for number in stage.layers)
        cuts = (
            tuple(
                (spec.item, spec.rows, spec.shape, spec.split)
                for spec in live_tensors(table, cut, stage.parallel)
            )
            for cut in (stage.layers.start, stage.layers.stop)
        )
        around = (
            tuple(graph.stages[number].unit.name for number in side)
            for side in (stage.before, stage.after)
        )
        slots = (slots_in_flight(stage, microbatches), stage.weight_delay)
        alike = (stage.unit.name, layers, *slots, *cuts, *around)
        groups.setdefault(alike, []).append(stage)
    return list(groups.values())
