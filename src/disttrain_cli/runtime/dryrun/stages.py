"""Distinct stages of a plan, and the records of the dry run's report.

Stages on the same ranks (`UnitPlan.chunks`) are observed together, and named by the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pydantic import BaseModel

from disttrain_cli.models.graph import LayerInfo, live_tensors
from disttrain_cli.schedule import interleaved
from disttrain_cli.schedule.one_f_one_b import slots_in_flight
from disttrain_cli.spec.stage_graph import Stage, StageGraph
from disttrain_cli.spec.trace import FORWARD

#: Name of the progress file: a double per process, the completed share of its work.
PROGRESS = "progress"


class Message(BaseModel):
    """State tensor that crosses a cut between stages in a slot."""

    instruction: str  # the one that sent or received it
    tensor: str
    shape: list[int]  # of this rank's rows
    dtype: str


class Wait(BaseModel):
    """Point at which the host waited for the device."""

    instruction: str  # "" = at the end of the step
    what: str  # an operator, or a copy
    where: str  # source line
    times: int  # in a step


class Failure(BaseModel):
    """Error that ended a stage's step early."""

    what: str
    where: str  # source line


class OrderSeen(BaseModel):
    """Check of all ranks' sends, receives and collectives in a step for deadlocks."""

    slots: int
    operations: int
    faults: list[str]  # `runtime.messages.proof`


class StageSeen(BaseModel):
    """Observations of one rank of a stage in a step, and in its last slot."""

    stages: list[int]  # numbers of the identical stages
    rank: int
    slots_in_flight: int  # of all stages of the rank
    slots: int  # in the observed step
    kept_gib: float = 0.0  # saved from forward to backward, per slot
    peak_gib: float = 0.0
    built_gib: float = 0.0  # peak while the engine was built
    leaked_gib: float = 0.0  # alive after the step, and not before it
    kernels: int = 0  # per slot, forward and backward
    host_operators: int = 0
    sends: int = 0
    send_gib: float = 0.0
    receives: int = 0
    receive_gib: float = 0.0
    collectives: int = 0
    collective_gib: float = 0.0
    devices: list[str] = []  # of the stage's parameters
    messages: list[Message] = []
    waits: list[Wait] = []
    failure: Failure | None = None
    took_s: float = 0.0
    host_mib: float = 0.0  # peak memory of the dry run's process


def in_flight(stage: Stage, microbatches: int) -> int:
    """Return the most slots between their forwards and backwards, over all stages of the ranks."""
    if (unit := stage.unit).chunks == 1:
        return slots_in_flight(microbatches, stage.to_end)
    order = interleaved.passes(unit.pp, unit.chunks, microbatches, stage.index)
    return max(accumulate(1 if one.operation == FORWARD else -1 for one in order))


def slots_seen(stage: Stage, microbatches: int) -> int:
    """Return the number of slots after which a rank's memory has reached its peak.

    With a split backward, weight gradients are deferred behind input gradients by `weight_delay`.
    Ranks with several stages take PP slots in turn on each of them, and have fewer in flight than
    two such rounds.
    """
    if stage.unit.chunks > 1:
        return min(microbatches, 3 * stage.unit.pp)
    flight = slots_in_flight(microbatches, stage.to_end)
    return min(microbatches, flight + 1 + (stage.weight_delay or 0))


def distinct(graph: StageGraph, table: Sequence[LayerInfo], microbatches: int) -> list[list[Stage]]:
    """Group the first stages of the ranks that do the same work.

    Stages of a group have equal layers, tensors over their cuts, slots in flight, delays and
    neighbouring units; with several stages on a rank, all of them.
    """

    def work(stage: Stage) -> tuple[object, ...]:
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
        return (stage.unit.name, layers, stage.weight_delay, *cuts, *around)

    groups: dict[tuple[object, ...], list[Stage]] = {}
    for stage in graph.first_stages:
        alike = (in_flight(stage, microbatches), *map(work, graph.together(stage)))
        groups.setdefault(alike, []).append(stage)
    return list(groups.values())
