"""Iteration times of many steps at once, nothing else: what a search over orderings asks of the
simulator.

The steps share stages, transfers and replicas and differ in durations only. The very numbers of
`simulate`, which keeps when everything happened; here one vectorised update per schedule step
serves all K steps, so that one costs microseconds. Only additions and maxima: the same on every
machine.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.simulation.pipeline import program_of
from disttrain_cli.simulation.timeline import Floats, Pipeline

NUMBERS = 16_384  # that one update handles, about: more fall out of the fast caches


def iterations_s(
    pipeline: Pipeline, forward_s: Floats, backward_s: Floats, weight_s: Floats | None = None
) -> Floats:
    """[K] times of the pipeline with other durations [n, S, R, K]; data are always there.

    Args:
        pipeline: its own durations count for nothing.
    """
    program, steps = program_of(pipeline), forward_s.shape[-1]
    ranks, stages = len(program.stage_of), len(program.depth)
    hold_s = program.hold_s[:, program.stage_of, None]
    times_s, size = np.empty(steps), max(1, NUMBERS // ranks)
    for begin in range(0, steps, size):
        chunk = slice(begin, min(steps, begin + size))
        count = chunk.stop - begin
        spent_s = np.zeros((program.steps, ranks, count))
        program.table(forward_s[..., chunk], True, spent_s)
        program.table(backward_s[..., chunk], False, spent_s)
        clock = np.zeros((ranks + stages + 1, count))  # as in `pipeline._step`
        arrived, latest = clock[:ranks], clock[ranks:-1]
        free, follow_s = arrived, None
        if weight_s is not None:
            free, follow_s = np.zeros_like(arrived), program.follow(pipeline, weight_s[..., chunk])
        start = np.empty((ranks, count))
        for step in range(program.steps):
            np.take(clock, program.sources[step % 2], axis=0, out=start, mode="clip")
            start += hold_s[step]
            for ranks_of, other, transfer_s in program.joins:
                np.maximum(start[ranks_of], latest[other] + transfer_s[step], out=start[ranks_of])
            np.maximum(start, free, out=start)
            np.add(start, spent_s[step], out=arrived)
            np.maximum.reduceat(arrived, program.first[:-1], axis=0, out=latest)
            if follow_s is not None:
                np.add(arrived, follow_s[step], out=free)
        if follow_s is not None:
            np.maximum.reduceat(free, program.first[:-1], axis=0, out=latest)
        times_s[chunk] = (latest + pipeline.reduce_s[:, None]).max(axis=0) + pipeline.step_s
    return times_s


def orders_s(pipeline: Pipeline, orders: NDArray[np.int64]) -> Floats:
    """[K] times of the pipeline with its slots in other orders [K, n]."""
    return iterations_s(
        pipeline,
        *(np.moveaxis(times_s[orders], 0, -1) for times_s in pipeline.parts_s),
    )


def of_replica(pipeline: Pipeline, replica: int) -> Pipeline:
    """The pipeline of one replica, where all stages have the same ones and nothing joins them."""
    replicas_of = slice(replica, replica + 1)
    return dataclasses.replace(
        pipeline,
        replicas=np.ones_like(pipeline.replicas),
        load_s=None,
        forward_s=pipeline.forward_s[..., replicas_of],
        backward_s=pipeline.backward_s[..., replicas_of],
        weight_s=None if pipeline.weight_s is None else pipeline.weight_s[..., replicas_of],
    )
