"""Replicas joined into processes: the layout, and the order of a step, as the processes of a
rehearsal see them.

A process takes the items of all its replicas, and for every slot the time of the slowest of them:
its devices run in lockstep, which `simulation.grouping` simulates too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from disttrain_cli.data.slots import ReplicaItems, StepOrder
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.stage_graph import StageGraph

#: By unit name, how many neighbouring replicas each process of its stages stands for.
Shares = Mapping[str, Sequence[int]]


def joined_layout(layout: Layout, shares: Shares) -> Layout:
    """The layout with a unit's processes as its replicas; a process stands for whole TP groups."""
    units = [
        unit.model_copy(
            update={
                "tp": 1,
                "cp": 1,
                "module_tp": {},
                "dp": len(shares[unit.name]),
                "gpus": len(shares[unit.name]) * unit.pp,
            }
        )
        for unit in layout.units
    ]
    return layout.model_copy(update={"units": units, "gpus_used": sum(unit.gpus for unit in units)})


def replicas_of(shares: Sequence[int], process: int) -> range:
    """The replicas that a process of a unit's stages stands for."""
    first = sum(shares[:process])
    return range(first, first + shares[process])


def ranks_of(processes: StageGraph, whole: StageGraph, shares: Shares) -> dict[int, int]:
    """By process, the (first) rank of the replica that it stands for; -1 where there are several
    replicas."""
    ranks = {}
    for stage, stage_of in zip(processes.stages, whole.stages, strict=True):
        for number, rank in enumerate(stage.ranks):
            replicas = replicas_of(shares[stage.unit.name], number)
            ranks[rank] = stage_of.rank(replicas[0]) if len(replicas) == 1 else -1
    return ranks


def joined_order(order: StepOrder, shares: Shares) -> StepOrder:
    """The order with the items of each process's replicas put together."""
    return replace(
        order,
        slots=[
            replace(
                slot,
                replicas={
                    unit: _joined(replicas, shares[unit])
                    for unit, replicas in slot.replicas.items()
                },
            )
            for slot in order.slots
        ],
    )


def _joined(replicas: Sequence[ReplicaItems], shares: Sequence[int]) -> list[ReplicaItems]:
    ends = list(itertools.accumulate(shares))
    groups = [replicas[end - count : end] for end, count in zip(ends, shares, strict=True)]
    return [
        {item: np.concatenate([items[item] for items in group]) for item in group[0]}
        for group in groups
    ]
