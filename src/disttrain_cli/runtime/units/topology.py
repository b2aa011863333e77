"""Who is who: places every rank of a plan at a (unit, stage, replica, TP rank).

Ranks are numbered unit by unit, inside a unit stage by stage, inside a stage replica by replica, inside a replica by
TP rank, so that neighbours in a pipeline and the replicas of a stage lie close. Units come in pipeline order, unless
their TP sizes differ: those of larger ones are numbered first, so that every TP group starts at a multiple of its
size and stays inside a node. No process group is made here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from disttrain_cli.spec.plan import Layout, UnitPlan, stage_cuts


@dataclass(frozen=True)
class Stage:
    """One pipeline position of a unit."""

    number: int  # through the whole pipeline
    unit: UnitPlan
    index: int  # inside the unit
    layers: range  # of the whole model
    ranks: tuple[int, ...]  # by replica, the TP ranks of each next to each other
    before: tuple[int, ...] = ()  # numbers of the stages whose output it takes
    after: tuple[int, ...] = ()  # numbers of the stages that take its output
    position: int = 0  # stages before it on its line, the longest where lines meet
    line: int = 1  # stages of that line, the longest where it parts
    beside: frozenset[int] = frozenset()  # layers of the units that stand beside its own: their tensors never come here

    @property
    def tp(self) -> int:
        return self.unit.tp

    def rank(self, replica: int, tp_rank: int = 0) -> int:
        """The rank of a replica's TP rank."""
        return self.ranks[replica * self.tp + tp_rank]

    def tp_group(self, replica: int) -> list[int]:
        """The ranks that share a replica's layers."""
        return list(self.ranks[replica * self.tp:(replica + 1) * self.tp])

    def dp_group(self, tp_rank: int) -> list[int]:
        """The ranks that hold equal weights, by replica."""
        return list(self.ranks[tp_rank::self.tp])


@dataclass(frozen=True)
class Place:
    """Where one rank stands."""

    rank: int
    stage: Stage
    replica: int
    tp_rank: int = 0

    @property
    def unit(self) -> UnitPlan:
        return self.stage.unit


@dataclass(frozen=True)
class Topology:
    """All stages of a plan in pipeline order."""

    stages: tuple[Stage, ...]

    @property
    def world_size(self) -> int:
        return sum(len(stage.ranks) for stage in self.stages)

    def place(self, rank: int) -> Place:
        """The place of a rank."""
        for stage in self.stages:
            if rank in stage.ranks:
                return Place(rank, stage, *divmod(stage.ranks.index(rank), stage.tp))
        raise AssertionError(f"no rank {rank} among {self.world_size}")


def build_topology(layout: Layout, layer_modules: Sequence[str], llm: str | None = None) -> Topology:
    """Place the ranks of `layout`; `layer_modules` names the module of every layer of the model, in order.

    Units before that of the module `llm` stand side by side, and so do those behind it (`spec.plan.neighbours`);
    without `llm` all are in a line.
    The plan must have been checked: every module is in one unit, and layers_per_stage sums to its layers.
    """
    first_ranks: dict[str, int] = {}
    rank = 0
    for unit in sorted(layout.units, key=lambda unit: -unit.tp):
        first_ranks[unit.name] = rank
        rank += unit.tp * unit.dp * unit.pp
    stages: list[Stage] = []
    layer = 0
    counts = [unit.pp for unit in layout.units]
    if llm is None:
        meet, cuts = 0, list(itertools.pairwise(range(sum(counts))))
    else:
        meet = layout.place_of(llm)
        cuts = stage_cuts(counts, meet)
    position, behind = [0] * sum(counts), [1] * sum(counts)  # stages before each, and from it to the end
    for sender, taker in cuts:
        position[taker] = max(position[taker], position[sender] + 1)
    for sender, taker in reversed(cuts):
        behind[sender] = max(behind[sender], behind[taker] + 1)
    for sender, taker in cuts:
        behind[taker] = behind[sender] - 1
    for place, unit in enumerate(layout.units):
        assert sum(unit.layers_per_stage) == sum(name in unit.modules for name in layer_modules)
        rank, size = first_ranks[unit.name], unit.tp * unit.dp
        side = () if llm is None or place == meet else layout.units[:meet] if place < meet else layout.units[meet + 1:]
        apart = {name for other in side if other is not unit for name in other.modules}
        beside = frozenset(number for number, name in enumerate(layer_modules) if name in apart)
        for index, count in enumerate(unit.layers_per_stage):
            number = len(stages)
            stages.append(Stage(
                number, unit, index, range(layer, layer + count), tuple(range(rank + index * size,
                                                                              rank + (index + 1) * size)),
                before=tuple(sender for sender, taker in cuts if taker == number),
                after=tuple(taker for sender, taker in cuts if sender == number),
                position=position[number], line=position[number] + behind[number], beside=beside))
            layer += count
    assert layer == len(layer_modules)
    return Topology(tuple(stages))
