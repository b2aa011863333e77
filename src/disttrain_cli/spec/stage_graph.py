"""The stage graph: every stage of a layout, its ranks, its predecessors and successors.

Units are in pipeline order around the one that holds the LLM. Those before it hold encoders: they
are parallel branches, and each sends to the LLM's first stage. Those after it hold generators:
parallel branches, too, and each receives from the LLM's last stage. Inside a unit, stages follow
each other. Modules are arranged in the same way.

Planner, simulator, runtime, analysis and pictures use this graph; nothing else derives neighbours,
depths or cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from disttrain_cli.spec.plan import Layout, UnitPlan

Number = TypeVar("Number", int, float)
Cut = tuple[int, int]  # (stage that sends activations, stage that receives them), by number


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a unit; `UnitPlan.chunks` of them are on the same ranks."""

    number: int  # over all units
    unit: UnitPlan
    index: int  # inside the unit
    layers: range  # of the entire model
    ranks: tuple[int, ...]  # by replica, then CP rank, then TP rank
    before: tuple[int, ...]  # numbers of the stages whose output it receives
    after: tuple[int, ...]  # numbers of the stages that receive its output
    depth: int  # number of preceding stages on its branch, the longest where branches meet
    # stages from it to the end of its branch, itself included, the longest where branches fork
    to_end: int
    parallel: frozenset[int]  # layers of parallel branches: their tensors never arrive here
    # number of the stage with the tied-embedding peer, if any
    twin: int | None

    @property
    def weight_delay(self) -> int | None:
        """Slots by which weight gradients are deferred after a backward; None: not deferred."""
        delays = self.unit.weight_delay
        return None if delays is None else delays[self.index]

    @property
    def name(self) -> str:
        return f"{self.unit.name} stage {self.index}"

    @property
    def chunk(self) -> int:
        """Index among the stages of its ranks."""
        return self.index // self.unit.pp

    @property
    def tp(self) -> int:
        return self.unit.tp

    @property
    def cp(self) -> int:
        return self.unit.cp

    @property
    def ep(self) -> int:
        return self.unit.ep

    def rank(self, replica: int, tp_rank: int = 0, cp_rank: int = 0) -> int:
        """Return the rank at these coordinates."""
        return self.ranks[(replica * self.cp + cp_rank) * self.tp + tp_rank]

    def replica_groups(self) -> list[list[int]]:
        """Return the groups of ranks that share a replica's work, in one node or filling nodes."""
        return _grouped(self.ranks, self.unit.tp_cp_size)

    def tp_groups(self) -> list[list[int]]:
        """Return the groups of ranks that shard the layers, with the same tokens of a replica."""
        return _grouped(self.ranks, self.tp)

    def cp_groups(self) -> list[list[int]]:
        """Return the groups of ranks that share the tokens of a replica, with equal weights."""
        return [
            group[tp_rank :: self.tp]
            for group in self.replica_groups()
            for tp_rank in range(self.tp)
        ]

    def ep_groups(self) -> list[list[int]]:
        """Return the groups of ranks that hold all experts together: consecutive ranks."""
        return _grouped(self.ranks, self.ep)

    def ep_nodes(self, gpus_per_node: int) -> int:
        """Return the fewest equal runs of an EP group's ranks that lie in one node each."""
        return next(
            runs
            for runs in range(1, self.ep + 1)
            if self.ep % runs == 0
            and all(
                run[0] // gpus_per_node == run[-1] // gpus_per_node
                for run in _grouped(self.ranks, self.ep // runs)
            )
        )

    def expert_group(self, ep_rank: int) -> list[int]:
        """Return the ranks that hold the same experts."""
        return list(self.ranks[ep_rank :: self.ep])

    def dp_group(self, tp_rank: int) -> list[int]:
        """Return the ranks that hold equal weights, by replica, then CP rank."""
        return list(self.ranks[tp_rank :: self.tp])


def _grouped(ranks: tuple[int, ...], size: int) -> list[list[int]]:
    return [list(ranks[first : first + size]) for first in range(0, len(ranks), size)]


@dataclass(frozen=True)
class RankCoords:
    """One rank by its stage, replica, CP rank and TP rank."""

    rank: int
    stage: Stage
    replica: int
    tp_rank: int = 0
    cp_rank: int = 0
    later: tuple[Stage, ...] = ()  # its stages after `stage` (`UnitPlan.chunks`)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All its stages, in pipeline order."""
        return self.stage, *self.later

    @property
    def layers(self) -> list[int]:
        """Its layers of all its stages, in pipeline order."""
        return [layer for stage in self.stages for layer in stage.layers]

    @property
    def unit(self) -> UnitPlan:
        return self.stage.unit

    @property
    def holder(self) -> int:
        """Index among the ranks that hold the same weights (`Stage.dp_group`)."""
        return self.replica * self.unit.cp + self.cp_rank

    @property
    def expert_holder(self) -> int:
        """Index among the ranks that hold the same experts (`Stage.expert_group`)."""
        return self.stage.ranks.index(self.rank) // self.unit.ep

    @property
    def ep_rank(self) -> int:
        """Index among the ranks that hold all experts together."""
        return self.stage.ranks.index(self.rank) % self.unit.ep

    @property
    def part(self) -> int:
        """Index among the ranks that share its replica's work on the stage."""
        return self.cp_rank * self.unit.tp + self.tp_rank


@dataclass(frozen=True)
class StageGraph:
    """All stages of a layout, numbered in pipeline order."""

    stages: tuple[Stage, ...]

    @cached_property
    def cuts(self) -> list[Cut]:
        """All cuts between stages, in ascending order."""
        return cuts_of(self.stages)

    @cached_property
    def first_stages(self) -> list[Stage]:
        """The first stage of every rank: together they have each rank once."""
        return [stage for stage in self.stages if not stage.chunk]

    @cached_property
    def world_size(self) -> int:
        return sum(len(stage.ranks) for stage in self.first_stages)

    def together(self, stage: Stage) -> list[Stage]:
        """Return the stages on the same ranks, in pipeline order."""
        return [one for one in self.stages if one.ranks == stage.ranks]

    def coords(self, rank: int) -> RankCoords:
        """Return the coordinates of a rank: stage, replica, TP and CP rank."""
        stage, *later = (stage for stage in self.stages if rank in stage.ranks)
        holder, tp_rank = divmod(stage.ranks.index(rank), stage.tp)
        replica, cp_rank = divmod(holder, stage.cp)
        return RankCoords(rank, stage, replica, tp_rank, cp_rank, tuple(later))


def stage_graph(layout: Layout, llm: str, tied: tuple[int, int] | None = None) -> StageGraph:
    """Return the graph of a layout with the LLM `llm`, and with a weight shared by layers `tied`.

    Ranks are numbered unit by unit, inside a unit stage by stage, inside a stage replica by
    replica, inside a replica by CP rank, then by TP rank, so that neighbours in a pipeline and the
    replicas of a stage are close. Units come in pipeline order, unless their TP × CP differ: those
    of larger ones are numbered first, so that the ranks of every replica stay inside a node, or are
    whole nodes.
    """
    counts, branch_point = [unit.stages for unit in layout.units], layout.index_of(llm)
    cuts = stage_cuts(counts, branch_point)
    depths, left = depths_of(cuts, sum(counts)), stages_to_end(cuts, sum(counts))
    ends = list(itertools.accumulate(sum(unit.layers_per_stage) for unit in layout.units))
    spans = [
        range(end - sum(unit.layers_per_stage), end)
        for unit, end in zip(layout.units, ends, strict=True)
    ]
    first_ranks = _first_ranks(layout.units)
    stages: list[Stage] = []
    for position, unit in enumerate(layout.units):
        parallel = frozenset(
            layer
            for other in parallel_to(position, len(counts), branch_point)
            for layer in spans[other]
        )
        stops = list(itertools.accumulate(unit.layers_per_stage, initial=spans[position].start))
        size = unit.tp_cp_size * unit.dp
        for index, (start, stop) in enumerate(itertools.pairwise(stops)):
            number, rank = len(stages), first_ranks[unit.name] + index % unit.pp * size
            stages.append(
                Stage(
                    number,
                    unit,
                    index,
                    range(start, stop),
                    tuple(range(rank, rank + size)),
                    before=tuple(sender for sender, taker in cuts if taker == number),
                    after=tuple(taker for sender, taker in cuts if sender == number),
                    depth=depths[number],
                    to_end=left[number],
                    parallel=parallel,
                    twin=None,
                )
            )
    return StageGraph(tuple(stages if tied is None else _with_twins(stages, tied)))


def _with_twins(stages: Sequence[Stage], tied: tuple[int, int]) -> list[Stage]:
    """Return the stages with those of two tied layers linked, if they are on different ranks."""
    ends = [next(stage for stage in stages if layer in stage.layers) for layer in tied]
    if ends[0].ranks == ends[1].ranks:
        return list(stages)
    twins = {one.number: other.number for one, other in zip(ends, reversed(ends), strict=True)}
    return [replace(stage, twin=twins.get(stage.number)) for stage in stages]


def _first_ranks(units: Iterable[UnitPlan]) -> dict[str, int]:
    """Return the first rank of each unit: those of larger TP × CP come first."""
    ordered = sorted(units, key=lambda unit: -unit.tp_cp_size)
    starts = itertools.accumulate((unit.gpus for unit in ordered), initial=0)
    return {unit.name: start for unit, start in zip(ordered, starts, strict=False)}


def neighbours(count: int, llm: int) -> list[tuple[int, int]]:
    """Return (sender, receiver) of all cuts between `count` units in pipeline order.

    Also for modules; the LLM's is at index `llm`.
    """
    return [(index, llm) for index in range(llm)] + [
        (llm, index) for index in range(llm + 1, count)
    ]


def parallel_to(index: int, count: int, llm: int) -> list[int]:
    """Return the units (or modules) on parallel branches of the one at `index`."""
    side = range(llm) if index < llm else range(llm + 1, count) if index > llm else range(0)
    return [other for other in side if other != index]


def stage_cuts(counts: Sequence[int], llm: int) -> list[Cut]:
    """Return all cuts between stages, in ascending order, for units with these stage counts.

    Stages are numbered over all units.
    """
    first = [0, *itertools.accumulate(counts)]
    inside = [
        (stage, stage + 1)
        for start, stop in itertools.pairwise(first)
        for stage in range(start, stop - 1)
    ]
    between = [
        (first[sender + 1] - 1, first[taker]) for sender, taker in neighbours(len(counts), llm)
    ]
    return sorted([*inside, *between])


def cuts_of(stages: Sequence[Stage]) -> list[Cut]:
    """Return all cuts between stages, in ascending order."""
    return [(stage.number, taker) for stage in stages for taker in stage.after]


def depths_of(cuts: Sequence[Cut], count: int) -> list[int]:
    """Return by stage the number of preceding stages on the longest branch that leads to it."""
    depths = [0] * count
    for sender, taker in cuts:
        depths[taker] = max(depths[taker], depths[sender] + 1)
    return depths


def stages_to_end(cuts: Sequence[Cut], count: int) -> list[int]:
    """Return by stage the stages from it to the end of its branch, itself included.

    Of branches that begin at one stage the longest counts: a stage of a shorter one is as far from
    the end as its peers there, so that DeepSpeed's schedule fits all of them.
    """
    left = [1] * count
    for sender, taker in reversed(cuts):
        left[sender] = max(left[sender], 1 + left[taker])
    for sender, taker in cuts:
        left[taker] = left[sender] - 1
    return left


def in_line(amounts: Sequence[Number], llm: int) -> list[Number]:
    """Return by unit the sum of its amount and all later ones, as if generators were sequential.

    For numbers of stages, encoders and the LLM get at least `stages_to_end`; a generator gets only
    those after it, so that a search's result is checked again for the entire layout
    (`costs.memory.layout_memory`).
    """
    return [amount + sum(amounts[max(index + 1, llm) :]) for index, amount in enumerate(amounts)]
