"""Joining of replicas into processes: layout and orders for the processes of a rehearsal.

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

#: Number of neighbouring replicas that each process of a unit's stages stands for, by unit name.
Shares = Mapping[str, Sequence[int]]


def joined_layout(layout: Layout, shares: Shares) -> Layout:
    """Return the layout with a unit's processes as its replicas.

    A process has whole TP groups; an EP group may have several processes.
    """
    units = [
        unit.model_copy(
            update={
                "tp": 1,
                "cp": 1,
                "ep": max(1, unit.replicas_together // shares[unit.name][0]),
                "module_tp": {},
                "dp": len(shares[unit.name]),
                "gpus": len(shares[unit.name]) * unit.pp,
            }
        )
        for unit in layout.units
    ]
    return layout.model_copy(update={"units": units, "gpus_used": sum(unit.gpus for unit in units)})


def replicas_of(shares: Sequence[int], process: int) -> range:
    """Return the replicas that a process of a unit's stages stands for."""
    first = sum(shares[:process])
    return range(first, first + shares[process])


def ranks_of(processes: StageGraph, whole: StageGraph, shares: Shares) -> dict[int, int]:
    """Return the first rank of each process' replica; -1 for a process of several replicas."""
    ranks = {}
    for stage, stage_of in zip(processes.stages, whole.stages, strict=True):
        for number, rank in enumerate(stage.ranks):
            replicas = replicas_of(shares[stage.unit.name], number)
            ranks[rank] = stage_of.rank(replicas[0]) if len(replicas) == 1 else -1
    return ranks


def joined_order(order: StepOrder, shares: Shares) -> StepOrder:
    """Return the order with the items of each process's replicas concatenated."""
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
