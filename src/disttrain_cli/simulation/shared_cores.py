"""A pipeline on the shared cores of one machine: event-driven processor sharing, for few ranks.

Times were measured with `shared_by` processes on `cores` cores at once, so each got min(1,
cores/shared_by) of a core. With k ranks computing each gets min(1, cores/k): operations run faster
than measured while others wait, and slower if more are busy than during the measurement. Messages
need cores too: none overlap with passes, whatever the pipeline's fields.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from disttrain_cli.schedule import interleaved, one_f_one_b
from disttrain_cli.schedule.one_f_one_b import inputs
from disttrain_cli.simulation.timeline import Pipeline, Timeline
from disttrain_cli.spec.trace import COMPUTE

KINDS = range(len(COMPUTE))


def speed(busy: int, cores: int, shared_by: int) -> float:
    """Return the speed of an operation relative to the measured one while `busy` ranks compute."""
    return min(1.0, cores / busy) / min(1.0, cores / shared_by)


def simulate_shared(pipeline: Pipeline, cores: int, shared_by: int) -> Timeline:
    """Return the timeline of one training step of ranks on shared cores, without waits for data."""
    assert pipeline.load_s is None
    slots, stages, _ = pipeline.forward_s.shape
    replicas, later = pipeline.replicas.tolist(), pipeline.weight_delay
    delays = [None] * stages if pipeline.weight_s is None or later is None else later.tolist()
    # passes of each rank of a replica as (operation, stage, slot)
    orders: list[Sequence[tuple[int, int, int]]] = [
        interleaved.passes(pipeline.devices, stages // pipeline.devices, slots, device)
        for device in range(pipeline.devices)
    ] or [
        [(what, stage, slot) for what, slot in one_f_one_b.passes(slots, to_end, delay)]
        for stage, (to_end, delay) in enumerate(zip(pipeline.to_end.tolist(), delays, strict=True))
    ]
    # by (operation, stage): stage, transfer in s, and True if it crosses into a unit
    received = {
        key: [
            (other, float(pipeline.transfer_s[cut]), bool(pipeline.entry[pipeline.cuts[cut][1]]))
            for cut, other in own
        ]
        for key, own in inputs(pipeline.cuts).items()
    }
    durations = [times_s.tolist() for times_s in pipeline.parts_s]
    # by [operation][slot][stage]: begin and end on each replica, and end on all of them
    shape = (len(KINDS), *pipeline.forward_s.shape)
    starts, ends = (np.full(shape, np.nan).tolist() for _ in range(2))
    complete = np.full(shape[:-1], np.inf).tolist()
    missing = np.broadcast_to(pipeline.replicas, shape[:-1]).tolist()
    position = {
        (device, replica): 0 for device in range(len(orders)) for replica in range(replicas[device])
    }
    running: dict[tuple[int, int], float] = {}  # rank → remaining work, in s at the measured speed
    now = 0.0
    while position:
        arrivals: list[float] = []
        for (device, replica), index in position.items():
            if (device, replica) in running:
                continue
            what, stage, slot = orders[device][index]
            ready = 0.0
            for other, transfer_s, crosses in received.get((what, stage), ()):
                end = complete[what][slot][other] if crosses else ends[what][slot][other][replica]
                ready = max(ready, np.inf if end != end else end + transfer_s)
            if ready <= now:
                running[device, replica] = durations[what][slot][stage][replica]
                starts[what][slot][stage][replica] = now
            elif ready < np.inf:
                arrivals.append(ready)
        assert running or arrivals, "the schedule deadlocks"
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
            device, replica = rank
            what, stage, slot = orders[device][position[rank]]
            ends[what][slot][stage][replica] = now
            missing[what][slot][stage] -= 1
            if not missing[what][slot][stage]:
                complete[what][slot][stage] = now
            position[rank] += 1
            if position[rank] == len(orders[device]):
                del position[rank]
    (forward, backward, weights) = zip(map(np.array, starts), map(np.array, ends), strict=True)
    last = np.nanmax([backward[1], weights[1]], axis=(0, 1, 3))
    finish = float((last + pipeline.reduce_s).max()) + pipeline.step_s
    split = weights if pipeline.weight_s is not None else (None, None)
    return Timeline(*forward, *backward, finish, None, *split)
