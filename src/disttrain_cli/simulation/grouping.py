"""Several replicas of a stage in one process, in lockstep: how a rehearsal carries more devices
than processes.

A process takes for each slot as long as the slowest of its replicas.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from disttrain_cli.simulation.timeline import Floats, Pipeline
from disttrain_cli.spec.plan import Layout


def grouped(pipeline: Pipeline, shares: Sequence[Sequence[int]]) -> Pipeline:
    """The pipeline of the processes, which are its replicas.

    Args:
        shares: by stage, the number of consecutive replicas in each of its processes; alike for the
            stages of a unit.
    """
    assert [sum(share) for share in shares] == pipeline.replicas.tolist()
    firsts = [[0, *itertools.accumulate(share)][:-1] for share in shares]
    widest = max(map(len, shares))

    def slowest(times_s: Floats) -> Floats:
        joined_s = np.zeros((*times_s.shape[:2], widest))
        for stage, first in enumerate(firsts):
            of_stage = times_s[:, stage, : pipeline.replicas[stage]]
            joined_s[:, stage, : len(first)] = np.maximum.reduceat(of_stage, first, axis=1)
        return joined_s

    return dataclasses.replace(
        pipeline,
        replicas=np.array([len(share) for share in shares]),
        forward_s=slowest(pipeline.forward_s),
        backward_s=slowest(pipeline.backward_s),
        weight_s=None if pipeline.weight_s is None else slowest(pipeline.weight_s),
        load_s=None if pipeline.load_s is None else slowest(pipeline.load_s),
    )


def unit_shares(layout: Layout, gpus_per_process: int) -> list[list[int]]:
    """By unit, how many replicas each process of one of its stages stands for: as even as possible.

    A process stands for whole replicas, for one at least.
    """
    shares = []
    for unit in layout.units:
        processes = -(-unit.dp // max(1, gpus_per_process // unit.tp_cp_size))
        shares.append([(unit.dp + more) // processes for more in reversed(range(processes))])
    return shares


def finest(layout: Layout, gpus_per_node: int, most: int = 24) -> int:
    """GPUs per process, as few as make at most `most` processes: a divisor of a node's GPUs, or
    several nodes.

    Where the plan has more stages than that, as few as make one process per stage.
    """
    stages = sum(unit.pp for unit in layout.units)
    divisors = (gpus for gpus in range(1, gpus_per_node) if gpus_per_node % gpus == 0)
    sizes = itertools.chain(divisors, itertools.count(gpus_per_node, gpus_per_node))
    return next(gpus for gpus in sizes if _processes(layout, gpus) <= max(most, stages))


def _processes(layout: Layout, gpus_per_process: int) -> int:
    return sum(
        unit.pp * len(share)
        for unit, share in zip(layout.units, unit_shares(layout, gpus_per_process), strict=True)
    )
