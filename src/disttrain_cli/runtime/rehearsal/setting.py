"""Settings of a rehearsal on this machine: processes, their replicas, and time scale. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from disttrain_cli.costs.layout import by_device, stages_of
from disttrain_cli.costs.preparing import item_s
from disttrain_cli.simulation.grouping import finest, unit_shares
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile

MOST_PROCESSES = 24
#: Core seconds of a process for a slot's forward and backward (`benchmarks/rehearsal.py
#: overhead`), the share of the cores that may be busy, and the minimum duration of a step on this
#: host: all processes end a step at the same time.
SLOT_CPU_S, BUSY, LEAST_STEP_S = 0.012, 0.35, 6.0


@dataclass(frozen=True)
class Setting:
    """Processes and time scale of a rehearsal."""

    gpus_per_process: int
    shares: dict[str, list[int]]  # replicas of each process of a stage, by unit
    processes: int
    time_scale: float


def setting_of(run: RunFile, plan: Plan, profile: Profile) -> Setting:
    """Return the processes and the time scale of a rehearsal."""
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
    step_s = max(plan.predicted.iteration_s, _prepared_s(run, layout, profile))
    passes = layout.microbatches * sum(
        unit.stages * len(shares[unit.name]) for unit in layout.units
    )
    scale = _time_scale(passes, step_s) if spec.time_scale == "auto" else spec.time_scale
    return Setting(per_process, shares, processes, scale)


def _prepared_s(run: RunFile, layout: Layout, profile: Profile) -> float:
    """Return the longest time for a replica's workers to prepare a step's data.

    In a long run no step is shorter on average.
    """

    def one_s(module: str) -> float:
        return profile.modules[module].work_per_sequence.items * item_s(profile, module)

    return (
        max(
            layout.global_batch_size / stage.unit.dp * sum(map(one_s, stage.begins))
            for stage in by_device(stages_of(profile, layout))
        )
        / run.preprocess.workers
    )


def _time_scale(passes: int, iteration_s: float) -> float:
    """Return seconds on this host per second of the cluster that let the host keep up.

    `passes` are forwards of all processes in a step; each has a backward.
    """
    busy_s = passes * SLOT_CPU_S / (os.cpu_count() or 1)
    return float(f"{max(busy_s / BUSY, LEAST_STEP_S) / iteration_s:.2g}")
