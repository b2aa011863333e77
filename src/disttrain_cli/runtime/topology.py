"""Who is who: places every rank of a plan at a (unit, stage, replica).

Ranks are numbered unit by unit in pipeline order, inside a unit stage by stage, inside a stage replica by
replica, so that neighbours in a pipeline and the replicas of a stage lie close. No process group is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disttrain_cli.spec.plan import Layout, UnitPlan


@dataclass(frozen=True)
class Stage:
    """One pipeline position of a unit."""

    number: int  # through the whole pipeline
    unit: UnitPlan
    index: int  # inside the unit
    layers: range  # of the whole model
    ranks: tuple[int, ...]  # by replica


@dataclass(frozen=True)
class Place:
    """Where one rank stands."""

    rank: int
    stage: Stage
    replica: int

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
                return Place(rank, stage, stage.ranks.index(rank))
        raise AssertionError(f"no rank {rank} among {self.world_size}")


def build_topology(layout: Layout, layer_modules: Sequence[str]) -> Topology:
    """Place the ranks of `layout`; `layer_modules` names the module of every layer of the model, in order.

    The plan must have been checked: every module is in one unit, and layers_per_stage sums to its layers.
    """
    stages: list[Stage] = []
    rank, layer = 0, 0
    for unit in layout.units:
        assert sum(unit.layers_per_stage) == sum(name in unit.modules for name in layer_modules)
        for index, count in enumerate(unit.layers_per_stage):
            ranks = tuple(range(rank, rank + unit.dp))
            stages.append(Stage(len(stages), unit, index, range(layer, layer + count), ranks))
            rank += unit.dp
            layer += count
    assert layer == len(layer_modules)
    return Topology(tuple(stages))
