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
    replicas = pipeline.replicas.tolist()
    orders = [operations(slots, to_end) for to_end in pipeline.to_end.tolist()]
    inputs = [
        [_inputs(pipeline, stage, forward) for forward in (False, True)] for stage in range(stages)
    ]
    durations = [pipeline.backward_s.tolist(), pipeline.forward_s.tolist()]
    # by [is forward][slot][stage]: when it began and ended on each replica, and on all of them
    starts, ends = (np.full((2, *pipeline.forward_s.shape), np.nan).tolist() for _ in range(2))
    complete = np.full((2, slots, stages), np.inf).tolist()
    missing = np.broadcast_to(pipeline.replicas, (2, slots, stages)).tolist()
    position = {
        (stage, replica): 0 for stage in range(stages) for replica in range(replicas[stage])
    }
    running: dict[tuple[int, int], float] = {}  # rank → work left, in s at the measured speed
    now = 0.0
    while position:
        arrivals: list[float] = []
        for (stage, replica), index in position.items():
            if (stage, replica) in running:
                continue
            forward, slot = orders[stage][index]
            ready = 0.0
            for other, transfer_s, crosses in inputs[stage][forward]:
                end = (
                    complete[forward][slot][other]
                    if crosses
                    else ends[forward][slot][other][replica]
                )
                ready = max(ready, np.inf if end != end else end + transfer_s)
            if ready <= now:
                running[stage, replica] = durations[forward][slot][stage][replica]
                starts[forward][slot][stage][replica] = now
            elif ready < np.inf:
                arrivals.append(ready)
        assert running or arrivals, "the schedule waits for itself"
        rate = speed(len(running), cores, shared_by) if running else 1.0
        least = min(running.values(), default=np.inf)
        elapsed = min(least / rate, min(arrivals, default=np.inf) - now)
        now = now + elapsed
        completes = elapsed >= least / rate
        for rank, left in list(running.items()):
            if not (completes and left <= least * (1 + 1e-12)):
                running[rank] = left - elapsed * rate
                continue
            del running[rank]
            stage, replica = rank
            forward, slot = orders[stage][position[rank]]
            ends[forward][slot][stage][replica] = now
            missing[forward][slot][stage] -= 1
            if not missing[forward][slot][stage]:
                complete[forward][slot][stage] = now
            position[rank] += 1
            if position[rank] == len(orders[stage]):
                del position[rank]
    backward_start, forward_start, backward_end, forward_end = map(np.array, (*starts, *ends))
    last = np.nanmax(backward_end, axis=(0, 2))
    finish = float((last + pipeline.reduce_s).max()) + pipeline.step_s
    return Timeline(forward_start, forward_end, backward_start, backward_end, finish)


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
