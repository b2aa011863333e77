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

from disttrain_cli.spec.plan import Layout, UnitPlan, following


@dataclass(frozen=True)
class Stage:
    """One pipeline position of a unit."""

    number: int  # through the whole pipeline
    unit: UnitPlan
    index: int  # inside the unit
    layers: range  # of the whole model
    ranks: tuple[int, ...]  # by replica, the TP ranks of each next to each other
    before: tuple[int, ...] = ()  # numbers of the stages whose output it takes
    after: int | None = None  # number of the stage that takes its output
    position: int = 0  # stages before it on its line, the longest where lines meet
    line: int = 1  # stages of that line
    reach: int = 0  # first layer of the model whose tensors may come here

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

    Units before that of the module `llm` stand side by side (`spec.plan.following`); without `llm` all are in a line.
    The plan must have been checked: every module is in one unit, and layers_per_stage sums to its layers.
    """
    first_ranks: dict[str, int] = {}
    rank = 0
    for unit in sorted(layout.units, key=lambda unit: -unit.tp):
        first_ranks[unit.name] = rank
        rank += unit.tp * unit.dp * unit.pp
    stages: list[Stage] = []
    layer = 0
    meet = 0 if llm is None else layout.place_of(llm)
    afters = _afters(layout, meet)
    position, behind = [0] * (len(afters) + 1), [0] * (len(afters) + 1)  # stages before each, and from it to the end
    for number, after in enumerate(afters):
        position[after] = max(position[after], position[number] + 1)
    for number, after in reversed(list(enumerate(afters))):
        behind[number] = behind[after] + 1
    for place, unit in enumerate(layout.units):
        assert sum(unit.layers_per_stage) == sum(name in unit.modules for name in layer_modules)
        rank, size, reach = first_ranks[unit.name], unit.tp * unit.dp, layer if place < meet else 0
        for index, count in enumerate(unit.layers_per_stage):
            number = len(stages)
            stages.append(Stage(
                number, unit, index, range(layer, layer + count), tuple(range(rank + index * size,
                                                                              rank + (index + 1) * size)),
                before=tuple(other for other, after in enumerate(afters) if after == number),
                after=afters[number] if afters[number] < len(afters) else None,
                position=position[number], line=position[number] + behind[number], reach=reach))
            layer += count
    assert layer == len(layer_modules)
    return Topology(tuple(stages))


def _afters(layout: Layout, meet: int) -> list[int]:
    """By stage, the number of the one that takes its output; as many as there are stages for the last."""
    first = [0, *itertools.accumulate(unit.pp for unit in layout.units)]
    return [first[place] + index + 1 if index + 1 < unit.pp else first[following(place, meet)]
            for place, unit in enumerate(layout.units) for index in range(unit.pp)]
