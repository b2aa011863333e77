"""1F1B over units of different DP, every rank with a device of its own: one vectorised update per schedule step.

DeepSpeed's TrainSchedule puts forward(slot m, stage s) at step 2m+s and backward(m, s) at step 2S-1-s+2m. The two
have different parities, so at every step a stage does one operation at most, and it waits for its own last one and
for the one that its neighbour did a step before. All replicas of all stages lie in one vector; what each of them
waits for depends on the step's parity only and is looked up beforehand. Sends do not hold up the sender. A slot
enters a unit when all replicas of the unit before have finished it, because images are split over replicas one by
one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.simulation.timeline import Pipeline, Timeline


def simulate(pipeline: Pipeline) -> Timeline:
    """Timeline of one training step. O(steps · replicas of all stages); two tables of that size are kept."""
    slots, stages, _ = pipeline.forward_s.shape
    steps = 2 * (slots + stages - 1)
    first = np.concatenate([[0], np.cumsum(pipeline.replicas)])
    stage_of = np.repeat(np.arange(stages), pipeline.replicas)
    ranks = len(stage_of)
    spent_s, starts = np.zeros((steps, ranks)), np.empty((steps, ranks))
    hold_s = np.full((steps, stages), -np.inf)  # transfer before a stage's operation; -inf: it does nothing
    for stage, is_forward, steps_of in _operations(slots, stages):
        durations = pipeline.forward_s if is_forward else pipeline.backward_s
        spent_s[steps_of, first[stage]:first[stage + 1]] = durations[:, stage, :pipeline.replicas[stage]]
        cut = stage - 1 if is_forward else stage
        hold_s[steps_of, stage] = pipeline.transfer_s[cut] if 0 <= cut < stages - 1 else 0.0
    sources = _sources(pipeline, first[:-1], stage_of)
    clock = np.zeros(ranks + stages + 1)  # end of every rank's last operation, the latest of every stage, and 0
    own, latest = clock[:ranks], clock[ranks:-1]
    held = np.empty(ranks)
    for step in range(steps):
        start = starts[step]
        np.take(clock, sources[step % 2], out=start, mode="clip")
        np.take(hold_s[step], stage_of, out=held, mode="clip")
        start += held
        np.maximum(start, own, out=start)
        np.add(start, spent_s[step], out=own)
        np.maximum.reduceat(own, first[:-1], out=latest)
    ends = spent_s
    ends += starts
    forward, backward = (np.full((2, *pipeline.forward_s.shape), np.nan) for _ in range(2))  # [start or end, n, S, R]
    for stage, is_forward, steps_of in _operations(slots, stages):
        for table, values in zip(forward if is_forward else backward, (starts, ends), strict=True):
            table[:, stage, :pipeline.replicas[stage]] = values[steps_of, first[stage]:first[stage + 1]]
    return Timeline(forward[0], forward[1], backward[0], backward[1],
                    float((latest + pipeline.reduce_s).max()) + pipeline.step_s)


def _operations(slots: int, stages: int) -> Iterator[tuple[int, bool, slice]]:
    """(stage, is forward, schedule steps of the slots in order) of all forwards and backwards."""
    for stage in range(stages):
        for is_forward, begin in ((True, stage), (False, 2 * stages - 1 - stage)):
            yield stage, is_forward, slice(begin, begin + 2 * slots - 1, 2)


def _sources(pipeline: Pipeline, first: NDArray[np.int64], stage_of: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """For even and odd steps, [ranks] the entry of the clock that every rank's operation waits for.

    A forward waits for the stage before, a backward for the one behind: for the same replica, or at the border of
    two units for the latest one. Stages with the step's parity do forwards, the others backwards.
    """
    stages, ranks = len(pipeline.replicas), len(stage_of)
    replica = np.arange(ranks) - first[stage_of]
    borders = np.append(pipeline.entry, True)  # [S+1] whether a unit begins at the stage
    waits: list[NDArray[np.int64]] = []
    for neighbour, border in ((stage_of - 1, borders[stage_of]), (stage_of + 1, borders[stage_of + 1])):
        inside = (neighbour >= 0) & (neighbour < stages)
        place = np.clip(neighbour, 0, stages - 1)
        waits.append(np.where(inside, np.where(border, ranks + place, first[place] + replica), ranks + stages))
    forward, backward = waits
    return [np.where(stage_of % 2 == parity, forward, backward) for parity in (0, 1)]
