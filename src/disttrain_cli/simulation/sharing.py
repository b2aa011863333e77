"""1F1B where all ranks share the cores of one machine: event-driven processor sharing, for few ranks.

Times were measured with `shared_by` processes on `cores` cores at once, so each got min(1, cores/shared_by) of
a core. With k ranks computing each gets min(1, cores/k): operations run faster than measured while others
wait, and slower when more are busy than were during the measurement.
"""

from __future__ import annotations

import numpy as np

from disttrain_cli.simulation.timeline import Pipeline, Timeline, operations


def speed(busy: int, cores: int, shared_by: int) -> float:
    """Speed of an operation relative to the measured one while `busy` ranks compute."""
    return min(1.0, cores / busy) / min(1.0, cores / shared_by)


def simulate_shared(pipeline: Pipeline, cores: int, shared_by: int) -> Timeline:
    """Timeline of one training step of ranks that share `cores` cores."""
    slots, stages, _ = pipeline.forward_s.shape
    shape = pipeline.forward_s.shape
    starts = {True: np.full(shape, np.nan), False: np.full(shape, np.nan)}
    ends = {True: np.full(shape, np.nan), False: np.full(shape, np.nan)}
    durations = {True: pipeline.forward_s, False: pipeline.backward_s}
    ranks = [(stage, replica) for stage in range(stages) for replica in range(int(pipeline.replicas[stage]))]
    orders = [operations(slots, stages, stage) for stage in range(stages)]
    place = dict.fromkeys(ranks, 0)  # position in the stage's order
    running: dict[tuple[int, int], float] = {}  # rank → work left, in s at the measured speed
    now = 0.0
    while any(place[rank] < len(orders[rank[0]]) for rank in ranks):
        arrivals: list[float] = []
        for rank in ranks:
            stage, replica = rank
            if rank in running or place[rank] >= len(orders[stage]):
                continue
            is_forward, slot = orders[stage][place[rank]]
            ready = _ready(pipeline, ends[is_forward], slot, stage, replica, is_forward)
            if ready <= now:
                running[rank] = float(durations[is_forward][slot, stage, replica])
                starts[is_forward][slot, stage, replica] = now
            elif np.isfinite(ready):
                arrivals.append(ready)
        assert running or arrivals, "the schedule waits for itself"
        rate = speed(len(running), cores, shared_by) if running else 1.0
        least = min(running.values(), default=np.inf)
        elapsed = min(least / rate, min(arrivals, default=np.inf) - now)
        now = now + elapsed
        completes = elapsed >= least / rate
        for rank, left in list(running.items()):
            if completes and left <= least * (1 + 1e-12):
                is_forward, slot = orders[rank[0]][place[rank]]
                ends[is_forward][slot, rank[0], rank[1]] = now
                del running[rank]
                place[rank] += 1
            else:
                running[rank] = left - elapsed * rate
    last = np.nanmax(ends[False], axis=(0, 2))
    finish = float((last + pipeline.reduce_s).max()) + pipeline.step_s
    return Timeline(starts[True], ends[True], starts[False], ends[False], finish)


def _ready(pipeline: Pipeline, ends: np.ndarray, slot: int, stage: int, replica: int, is_forward: bool) -> float:
    """When an operation's input is there; infinite while its neighbour has not finished."""
    neighbour = stage - 1 if is_forward else stage + 1
    if not 0 <= neighbour < len(pipeline.replicas):
        return 0.0
    crosses = pipeline.entry[stage] if is_forward else pipeline.entry[neighbour]
    done = ends[slot, neighbour, : pipeline.replicas[neighbour]] if crosses else ends[slot, neighbour, [replica]]
    if np.isnan(done).any():
        return np.inf
    return float(done.max() + pipeline.transfer_s[min(stage, neighbour)])
