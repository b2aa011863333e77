"""How a plan is rehearsed on this machine: how many processes, for which replicas, and how fast. No
torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from disttrain_cli.simulation.grouping import finest, unit_shares
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.runfile import RunFile

MOST_PROCESSES = 24
#: Time of a core that a process takes for a slot's forward and backward (`benchmarks/rehearsal.py
#: overhead`), the share of the cores that may be busy, and seconds that a step takes here at
#: least: all processes end one at the same time.
SLOT_CPU_S, BUSY, LEAST_STEP_S = 0.012, 0.35, 6.0


@dataclass(frozen=True)
class Setting:
    """How a plan is rehearsed."""

    gpus_per_process: int
    shares: dict[str, list[int]]  # by unit, replicas of each process of one of its stages
    processes: int
    time_scale: float


def setting_of(run: RunFile, plan: Plan) -> Setting:
    """The processes and the time scale of a rehearsal."""
    spec, layout = run.rehearse, plan.plan
    per_process = (
        finest(layout, run.cluster.gpus_per_node, MOST_PROCESSES)
        if spec.gpus_per_process == "auto"
        else spec.gpus_per_process
    )
    shares = {
        unit.name: share
        for unit, share in zip(layout.units, unit_shares(layout, per_process), strict=True)
    }
    processes = sum(unit.pp * len(shares[unit.name]) for unit in layout.units)
    scale = (
        _time_scale(layout, processes, plan.predicted.iteration_s)
        if spec.time_scale == "auto"
        else spec.time_scale
    )
    return Setting(per_process, shares, processes, scale)


def _time_scale(layout: Layout, processes: int, iteration_s: float) -> float:
    """Seconds here per second of the cluster, so that the host keeps up."""
    busy_s = processes * layout.microbatches * SLOT_CPU_S / (os.cpu_count() or 1)
    return float(f"{max(busy_s / BUSY, LEAST_STEP_S) / iteration_s:.2g}")
