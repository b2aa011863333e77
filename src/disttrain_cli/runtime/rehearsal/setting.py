"""How a plan is rehearsed on this machine: how many processes, for which replicas, and how fast. No
torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from disttrain_cli.costs.layout import stages_of
from disttrain_cli.costs.preparing import item_s
from disttrain_cli.simulation.grouping import finest, unit_shares
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.profile import Profile
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


def setting_of(run: RunFile, plan: Plan, profile: Profile) -> Setting:
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
    step_s = max(plan.predicted.iteration_s, _prepared_s(run, layout, profile))
    scale = _time_scale(layout, processes, step_s) if spec.time_scale == "auto" else spec.time_scale
    return Setting(per_process, shares, processes, scale)


def _prepared_s(run: RunFile, layout: Layout, profile: Profile) -> float:
    """Seconds in which the workers of any replica prepare its data of a step: no step of many is
    shorter."""

    def one_s(module: str) -> float:
        return profile.modules[module].work_per_sequence.items * item_s(profile, module)

    return (
        max(
            layout.global_batch_size / stage.unit.dp * sum(map(one_s, stage.begins))
            for stage in stages_of(profile, layout)
        )
        / run.preprocess.workers
    )


def _time_scale(layout: Layout, processes: int, iteration_s: float) -> float:
    """Seconds here per second of the cluster, so that the host keeps up."""
    busy_s = processes * layout.microbatches * SLOT_CPU_S / (os.cpu_count() or 1)
    return float(f"{max(busy_s / BUSY, LEAST_STEP_S) / iteration_s:.2g}")
