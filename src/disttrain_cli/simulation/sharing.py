"""1F1B where all ranks share the cores of one machine: event-driven processor sharing, for few
ranks.

Times were measured with `shared_by` processes on `cores` cores at once, so each got min(1,
cores/shared_by) of a core. With k ranks computing each gets min(1, cores/k): operations run faster
than measured while others wait, and slower when more are busy than were during the measurement.
"""

from __future__ import annotations

import numpy as np

from disttrain_cli.simulation.timeline import Pipeline, Timeline, operations


def speed(busy: int, cores: int, shared_by: int) -> float:
    """Speed of an operation relative to the measured one while `busy` ranks compute."""
    return min(1.0, cores / busy) / min(1.0, cores / shared_by)


def simulate_shared(pipeline: Pipeline, cores: int, shared_by: int) -> Timeline:
    """Timeline of one training step of ranks that share `cores` cores; their data are always
    there."""
    assert pipeline.load_s is None
    slots, stages, _ = pipeline.forward_s.shape
    shape = pipeline.forward_s.shape
    starts = {True: np.full(shape, np.nan), False: np.full(shape, np.nan)}
    ends = {True: np.full(shape, np.nan), False: np.full(shape, np.nan)}
    durations = {True: pipeline.forward_s, False: pipeline.backward_s}
    ranks = [
        (stage, replica)
        for stage in range(stages)
        for replica in range(int(pipeline.replicas[stage]))
    ]
    orders = [operations(slots, to_end) for to_end in pipeline.to_end.tolist()]
    inputs = {
        (stage, is_forward): _inputs(pipeline, stage, is_forward)
        for stage in range(stages)
        for is_forward in (True, False)
    }
    position = dict.fromkeys(ranks, 0)  # position in the stage's order
    running: dict[tuple[int, int], float] = {}  # rank → work left, in s at the measured speed
    now = 0.0
    while any(position[rank] < len(orders[rank[0]]) for rank in ranks):
        arrivals: list[float] = []
        for rank in ranks:
            stage, replica = rank
            if rank in running or position[rank] >= len(orders[stage]):
                continue
            is_forward, slot = orders[stage][position[rank]]
            ready = max(
                (
                    _ready(
                        ends[is_forward][slot, other, : pipeline.replicas[other]], replica, crosses
                    )
                    + transfer_s
                    for other, transfer_s, crosses in inputs[stage, is_forward]
                ),
                default=0.0,
            )
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
                is_forward, slot = orders[rank[0]][position[rank]]
                ends[is_forward][slot, rank[0], rank[1]] = now
                del running[rank]
                position[rank] += 1
            else:
                running[rank] = left - elapsed * rate
    last = np.nanmax(ends[False], axis=(0, 2))
    finish = float((last + pipeline.reduce_s).max()) + pipeline.step_s
    return Timeline(starts[True], ends[True], starts[False], ends[False], finish)


def _inputs(pipeline: Pipeline, stage: int, is_forward: bool) -> list[tuple[int, float, bool]]:
    """Where an operation's inputs come from: stage, transfer in s, and whether another unit is
    entered."""
    cuts = pipeline.before(stage) if is_forward else pipeline.after(stage)
    return [
        (
            pipeline.cuts[cut][0 if is_forward else 1],
            float(pipeline.transfer_s[cut]),
            bool(pipeline.entry[pipeline.cuts[cut][1]]),
        )
        for cut in cuts
    ]


def _ready(ends: np.ndarray, replica: int, crosses: bool) -> float:
    """When a stage has finished a slot, all its replicas or one; infinite while it has not. `ends`
    of its replicas."""
    done = float(ends.max() if crosses else ends[replica])
    return np.inf if np.isnan(done) else done
