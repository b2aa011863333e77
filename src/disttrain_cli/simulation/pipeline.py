"""1F1B over units of different DP, every rank with a device of its own: numpy recurrences over replicas.

DeepSpeed's TrainSchedule puts forward(slot m, stage s) at step 2m+s and backward(m, s) at step 2S-1-s+2m, so at
every step each stage waits for its own last operation and for the one that its neighbour did a step before.
One pass over 2(n+S-1) steps, each vectorised over stages and replicas, gives the exact timeline. Sends do
not hold up the sender. A slot enters a unit when all replicas of the unit before have finished it, because
images are split over replicas one by one.
"""

from __future__ import annotations

import numpy as np

from disttrain_cli.simulation.timeline import Pipeline, Timeline


def simulate(pipeline: Pipeline) -> Timeline:
    """Timeline of one training step."""
    slots, stages, width = pipeline.forward_s.shape
    present = pipeline.present
    shape = (slots, stages, width)
    starts = {True: np.full(shape, np.nan), False: np.full(shape, np.nan)}
    ends = {True: np.full(shape, np.nan), False: np.full(shape, np.nan)}
    durations = {True: pipeline.forward_s, False: pipeline.backward_s}
    end = np.where(present, 0.0, -np.inf)
    stage_ids = np.arange(stages)
    for step in range(2 * (slots + stages - 1)):
        before = end
        end = before.copy()
        widest = before.max(axis=1)
        for is_forward in (True, False):
            first = stage_ids if is_forward else 2 * stages - 1 - stage_ids
            offset = step - first
            active = stage_ids[(offset >= 0) & (offset % 2 == 0) & (offset // 2 < slots)]
            if not len(active):
                continue
            slot = offset[active] // 2
            start = np.maximum(before[active], _arrival(pipeline, before, widest, active, is_forward))
            start = np.where(present[active], start, np.nan)
            done = start + durations[is_forward][slot, active]
            starts[is_forward][slot, active] = start
            ends[is_forward][slot, active] = done
            end[active] = np.where(present[active], done, -np.inf)
    finish = float((end.max(axis=1) + pipeline.reduce_s).max()) + pipeline.step_s
    return Timeline(starts[True], ends[True], starts[False], ends[False], finish)


def _arrival(pipeline: Pipeline, before: np.ndarray, widest: np.ndarray, active: np.ndarray,
             is_forward: bool) -> np.ndarray:
    """[stages, R] when the input of the active stages' operations is there: the neighbour's last end + transfer."""
    stages = len(pipeline.replicas)
    neighbour = active - 1 if is_forward else active + 1
    inside = (neighbour >= 0) & (neighbour < stages)
    neighbour = np.clip(neighbour, 0, stages - 1)
    crosses = pipeline.entry[active] if is_forward else pipeline.entry[neighbour]
    cut = np.clip(np.minimum(active, neighbour), 0, max(0, stages - 2))
    transfer = pipeline.transfer_s[cut] if stages > 1 else np.zeros(len(active))
    arrival = np.where(crosses[:, None], widest[neighbour][:, None], before[neighbour]) + transfer[:, None]
    return np.where(inside[:, None], arrival, 0.0)
