"""Iteration times of many steps at once, for searches over orderings and weight-gradient delays.

The steps share stages, transfers and replicas and differ in durations or delays only. The times are
equal to those of `simulate`, which also returns the timeline; here one vectorised update per
schedule step serves all K steps, so that one costs microseconds. Only additions and maxima are
used: the same on every machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.simulation.pipeline import Program, following, program_of, simulate
from disttrain_cli.simulation.timeline import Floats, Pipeline

NUMBERS = 16_384  # numbers per update, about: more do not fit into the fast caches
TABLE_NUMBERS = 1 << 24  # numbers in a table of all updates
MOST_PARTS = 256  # cached weight gradients, by stage and delay


def steps_s(pipelines: Sequence[Pipeline]) -> Floats:
    """Return [K] times of steps of one layout without waits for data."""
    if pipelines[0].devices:
        return np.array([simulate(pipeline).iteration_s for pipeline in pipelines])
    parts_s = zip(*(pipeline.parts_s for pipeline in pipelines), strict=True)
    return iterations_s(pipelines[0], *(np.stack(part_s, axis=-1) for part_s in parts_s))


def iterations_s(
    pipeline: Pipeline, forward_s: Floats, backward_s: Floats, weight_s: Floats | None = None
) -> Floats:
    """Return [K] times of the pipeline with other durations [n, S, R, K], without waits for data.

    Args:
        pipeline: its durations are ignored.
        forward_s, backward_s: durations of the passes.
        weight_s: weight gradients of split backwards; None: backwards are not split.
    """
    assert not pipeline.devices, "1F1B, with a stage for each rank"
    program, steps = program_of(pipeline), forward_s.shape[-1]
    times_s = np.empty(steps)
    for chunk in _chunks(program, steps):
        some = dataclasses.replace(
            pipeline,
            forward_s=forward_s[..., chunk],
            backward_s=backward_s[..., chunk],
            weight_s=None if weight_s is None else weight_s[..., chunk],
        )
        spent_s = np.zeros((program.steps, len(program.stage_of), chunk.stop - chunk.start))
        program.table(some.forward_s, True, spent_s)
        program.table(some.backward_s, False, spent_s)
        follow_s = None if some.weight_s is None else program.follow(some, some.weight_s)
        times_s[chunk] = _run(some, program, spent_s, follow_s, _of_ranks(some, some.exposed_s))
    return times_s


class Delayed:
    """A pipeline with split backwards, for various delays of the weight gradients.

    There are no waits for data. What the steps have in common is computed once.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        assert pipeline.weight_s is not None
        self.pipeline, self._weight_s = pipeline, pipeline.weight_s
        self._program = program = program_of(pipeline)
        spent_s = np.zeros((program.steps, len(program.stage_of)))
        program.table(pipeline.forward_s, True, spent_s)
        program.table(pipeline.backward_s, False, spent_s)
        self._spent_s = spent_s[..., None]
        self._reducing = pipeline.reducing and pipeline.reducing.of(program.stage_of)
        self._parts = lru_cache(MOST_PARTS)(self._parts_of)

    def times_s(self, delays: NDArray[np.int64]) -> Floats:
        """Return [K] times for delays [K, S] of all stages."""
        pipeline, program, times_s = self.pipeline, self._program, np.empty(len(delays))
        ranks, reducing = len(program.stage_of), self._reducing
        for chunk in _chunks(program, len(delays)):
            mine = delays[chunk]
            follow_s = np.zeros((program.steps, ranks, len(mine)))
            last_s = np.zeros((ranks, len(mine)))
            for stage in range(len(program.ticks)):
                places = program.at(stage, False)
                which, counts = np.unique(mine[:, stage], return_counts=True)
                for number, delay in enumerate(which[np.argsort(-counts, kind="stable")].tolist()):
                    # the most frequent one first, for all: searches change one stage at a time
                    having = np.flatnonzero(mine[:, stage] == delay) if number else slice(None)
                    after_s, own_s = self._parts(stage, delay)
                    follow_s[places][..., having] = after_s
                    if own_s is not None:
                        last_s[places[1]][:, having] = own_s
            exposed_s = (
                _of_ranks(pipeline, pipeline.exposed_s)
                if reducing is None
                else reducing.left_s(last_s)
            )
            times_s[chunk] = _run(pipeline, program, self._spent_s, follow_s, exposed_s)
        return times_s

    def _parts_of(self, stage: int, delay: int) -> tuple[Floats, Floats | None]:
        """Return the weight gradients after a stage's backwards [n, R, 1] and its last pass [R, 1].

        The last pass is the one before its overlapped reductions, None without such.
        """
        replicas = int(self.pipeline.replicas[stage])
        after_s = following(self._weight_s[:, stage, :replicas], delay)[..., None]
        if self._reducing is None:
            return after_s, None
        return after_s, self.pipeline.last_pass_s(stage, delay)[:replicas, None]


def _of_ranks(pipeline: Pipeline, each_s: Floats) -> Floats:
    """Convert times [S, R, K] to [ranks, K]; K is 1 if that axis is missing."""
    return each_s[pipeline.present].reshape(int(pipeline.replicas.sum()), -1)


def _chunks(program: Program, count: int) -> Iterator[slice]:
    """Yield slices of `count` steps that fit into one update and memory."""
    ranks = len(program.stage_of)
    size = max(1, min(NUMBERS // ranks, TABLE_NUMBERS // (ranks * program.steps)))
    for begin in range(0, count, size):
        yield slice(begin, min(count, begin + size))


def _run(
    pipeline: Pipeline,
    program: Program,
    spent_s: Floats,
    follow_s: Floats | None,
    exposed_s: Floats,
) -> Floats:
    """Return [K] times of steps, computed as in `pipeline._step`.

    Args:
        pipeline: stages, transfers and replicas.
        program: its schedule.
        spent_s: [steps, ranks, K] durations of the operations.
        follow_s: [steps, ranks, K] weight gradients after them; None: backwards are not split.
        exposed_s: [ranks, K] reductions after the last operations.
    """
    count = (spent_s if follow_s is None else follow_s).shape[-1]
    ranks, stages = len(program.stage_of), len(program.ticks)
    hold_s = program.hold_s[:, program.stage_of, None]
    clock = np.zeros((ranks + stages + 1, count))
    arrived, latest = clock[:ranks], clock[ranks:-1]
    arrived[:] = _of_ranks(pipeline, pipeline.lead_s)
    free = arrived if follow_s is None else arrived.copy()
    start = np.empty((ranks, count))
    ends = [
        (arrived[program.first[stage] : program.first[stage + 1]], latest[stage])
        for stage in program.awaited
    ]
    for step in range(program.steps):
        clock.take(program.sources[step % 2], axis=0, out=start, mode="clip")
        start += hold_s[step]
        for ranks_of, other, transfer_s in program.joins:
            np.maximum(start[ranks_of], latest[other] + transfer_s[step], out=start[ranks_of])
        np.maximum(start, free, out=start)
        np.add(start, spent_s[step], out=arrived)
        for of_stage, last in ends:
            np.maximum.reduce(of_stage, axis=0, out=last)
        if follow_s is not None:
            np.add(arrived, follow_s[step], out=free)
    times_s: Floats = (free + exposed_s).max(axis=0) + pipeline.closing_s
    return times_s


def orders_s(pipeline: Pipeline, orders: NDArray[np.int64]) -> Floats:
    """Return [K] times of the pipeline with its slots in other orders [K, n]."""
    # [S, R, n, K]: steps are contiguous in memory
    ordered = [
        np.take(np.moveaxis(times_s, 0, -1), orders.T, axis=-1) for times_s in pipeline.parts_s
    ]
    return iterations_s(pipeline, *(np.moveaxis(times_s, 2, 0) for times_s in ordered))


def of_replica(pipeline: Pipeline, replica: int) -> Pipeline:
    """Return the pipeline of one replica.

    All stages must have the same number of replicas, and no replica may wait for another one.
    """
    replicas_of = slice(replica, replica + 1)
    return dataclasses.replace(
        pipeline,
        replicas=np.ones_like(pipeline.replicas),
        load_s=None,
        forward_s=pipeline.forward_s[..., replicas_of],
        backward_s=pipeline.backward_s[..., replicas_of],
        weight_s=None if pipeline.weight_s is None else pipeline.weight_s[..., replicas_of],
    )
