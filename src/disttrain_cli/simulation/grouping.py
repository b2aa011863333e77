"""Several replicas of a stage in one process, in lockstep: more devices than processes.

A rehearsal runs so. For each slot a process takes as long as the slowest of its replicas.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from disttrain_cli.simulation.timeline import Floats, Pipeline
from disttrain_cli.spec.plan import Layout


def grouped(pipeline: Pipeline, shares: Sequence[Sequence[int]]) -> Pipeline:
    """Return the pipeline whose replicas are the processes.

    Args:
        pipeline: pipeline of all replicas.
        shares: by stage, the number of consecutive replicas in each of its processes; equal for the
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
    """Return, by unit, the number of replicas in each process of one of its stages, evenly divided.

    A process represents complete replicas, at least one, of whole EP groups or of one of them, of
    which all processes then have as many.
    """
    shares = []
    for unit in layout.units:
        each, together = max(1, gpus_per_process // unit.tp_cp_size), unit.replicas_together
        block = max(size for size in range(1, min(each, together) + 1) if together % size == 0)
        blocks, most = unit.dp // block, each // block if block == together else 1
        processes = -(-blocks // most)
        shares.append(
            [block * ((blocks + more) // processes) for more in reversed(range(processes))]
        )
    return shares


def finest(layout: Layout, gpus_per_node: int, most: int = 24) -> int:
    """Return the fewest GPUs per process that need at most `most` processes.

    The number divides a node's GPUs, or is a multiple of them. If the plan has more stages than
    `most`, there is one process per stage.
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
