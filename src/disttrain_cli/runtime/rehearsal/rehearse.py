"""The launcher's side of a rehearsal: it starts the processes, and simulates the very steps that
they ran."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from disttrain_cli.costs.layout import stages_of
from disttrain_cli.data.index import Index
from disttrain_cli.data.index_checks import check_profiled_data
from disttrain_cli.data.ordering.loads import order_loads
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.slots import Assignment
from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.launching.starts import alone, job_of, run_ranks, step_to_resume
from disttrain_cli.runtime.rehearsal.feeding import rehearsed_index
from disttrain_cli.runtime.rehearsal.setting import Setting, setting_of
from disttrain_cli.simulation.faults import check_faults, inject
from disttrain_cli.simulation.grouping import grouped
from disttrain_cli.simulation.pipeline import simulate_steps
from disttrain_cli.simulation.step import fed, pipeline_of
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.trace import Rehearsed


class Late(BaseModel):
    """By how much the host was behind the starts of emulated operations, in its own ms."""

    mean: float
    p99: float
    max: float


class RehearsalResult(BaseModel):
    """What `train --rehearse --json` prints, besides the operations compared."""

    run_dir: str
    processes: int
    gpus: int
    gpus_per_process: int
    time_scale: float
    messages: str
    steps: list[dict[str, Any]]
    simulated: list[dict[str, Any]]
    predicted_iteration_s: float
    late_ms: Late
    operations_emulated: int
    cpu_ms_per_operation: float
    peak_mib: float = Field(
        description="Resident memory of all processes; pages that they share count in each."
    )
    checkpoint: str
    trace: str
    resumed_from_step: int | None


def rehearse(
    run: Run,
    plan: Plan,
    profile: Profile,
    *,
    steps: int | None = None,
    resume: bool = False,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress = silent,
) -> RehearsalResult:
    """Rehearse the plan for some steps (the run file's `rehearse.steps`, if not given) in
    `runs/NAME/rehearsal/`.

    The plan must have been checked against the run and profile (`planning.check`).

    Raises:
        SpecError: a fault names a place that the plan lacks, or there is nothing to resume from.
        DisttrainError: another rehearsal of this run is under way.
        MismatchError: the dataset or the checkpoint is not the one of the profile.
        RankFailedError: a process failed.
    """
    folder, total = run.dir.rehearsal, steps if steps is not None else run.file.rehearse.steps
    check_faults(stages_of(profile, plan.plan), run.file.rehearse.faults, profile)
    setting, index = setting_of(run.file, plan, profile), _checked_index(run, profile)
    with alone(folder):
        resumed = step_to_resume(run, profile, folder, total) if resume else None
        progress("ordering the steps", 0, 0)
        first = resumed or 0
        known = found_orders(run, plan.plan, profile, index, range(first, total + 1))
        payload = {
            "run": str(run.path.resolve()),
            "plan": plan.model_dump(mode="json"),
            "folder": str(folder.root),
            "profile": profile.model_dump(mode="json"),
            "shares": setting.shares,
            "assignments": {
                step: [one.positions.tolist(), one.carry] for step, one in known.items()
            },
            "gpus_per_node": run.file.cluster.gpus_per_node,
            "time_scale": setting.time_scale,
            "began_ns": time.monotonic_ns(),
        }
        job = job_of(run, plan, profile, _rehearsed(run, setting))
        reader = run_ranks(
            folder,
            job,
            "disttrain_cli.runtime.rehearsal.worker:main",
            setting.processes,
            payload,
            steps=total,
            resume=resume,
            on_step=on_step,
            progress=progress,
        )
    progress("simulating the same steps", 0, 0)
    return RehearsalResult(
        run_dir=str(folder.root),
        processes=setting.processes,
        gpus=plan.plan.gpus_used,
        gpus_per_process=setting.gpus_per_process,
        time_scale=setting.time_scale,
        messages=run.file.rehearse.messages,
        steps=[_step(row) for row in reader.steps],
        simulated=simulated(run, plan.plan, profile, index, setting, range(first, total), known),
        predicted_iteration_s=plan.predicted.iteration_s,
        **_host(folder, reader.name),
        checkpoint=str(folder.checkpoints / f"step-{total:06d}"),
        trace=str(folder.traces),
        resumed_from_step=resumed,
    )


def _step(row: dict[str, Any]) -> dict[str, Any]:
    """A step as it was reported, without what an emulated model has none of."""
    return {key: value for key, value in row.items() if key not in ("loss", "losses", "grad_norm")}


def found_orders(
    run: Run, layout: Layout, profile: Profile, index: Index, steps: range
) -> dict[int, Assignment]:
    """What the policy `best` decides for the steps, once for all processes: they share few cores.

    As every process of a cluster does by itself while the step before runs. Other policies take no
    time.
    """
    if run.file.train.ordering_on(profile.device.kind) != "best":
        return {}
    orders = Orders(run.file, layout, index, profile)
    return {step: orders.assignment(step) for step in steps}


def simulated(
    run: Run,
    layout: Layout,
    profile: Profile,
    index: Index,
    setting: Setting,
    steps: range,
    known: Mapping[int, Assignment],
) -> list[dict[str, Any]]:
    """The simulator's time for these very steps: the same orders, processes, data and faults,
    without noise."""
    stages, orders, pipelines = (
        stages_of(profile, layout),
        Orders(run.file, layout, index, profile, known),
        [],
    )
    spec = run.file.preprocess
    shares = [setting.shares[stage.unit.name] for stage in stages]
    for step in steps:
        loads = order_loads(orders.of(step)[0], layout)
        pipeline = pipeline_of(profile, layout, stages, loads, run.file.cluster.gpus_per_node)
        pipeline = fed(pipeline, profile, stages, loads, spec.workers, spec.prefetch_slots)
        pipelines.append(grouped(inject(pipeline, stages, run.file.rehearse.faults), shares))
    return [
        {"step": step, "iteration_s": timeline.iteration_s}
        for step, timeline in zip(steps, simulate_steps(pipelines), strict=True)
    ]


def _checked_index(run: Run, profile: Profile) -> Index:
    index = rehearsed_index(run, profile.inputs)
    if run.file.rehearse.distribution is None:
        check_profiled_data(index.fingerprint, profile)
    return index


def _rehearsed(run: Run, setting: Setting) -> Rehearsed:
    spec = run.file.rehearse
    return Rehearsed(
        processes=setting.processes,
        time_scale=setting.time_scale,
        messages=spec.messages,
        noise=spec.noise,
        faults=spec.faults,
        distribution=None if spec.distribution is None else spec.distribution.name,
    )


def _host(folder: RunDir, name: str) -> dict[str, Any]:
    """What the processes say of the emulation itself."""
    told = [
        json.loads(path.read_text())
        for path in sorted(Path(folder.logs).glob(f"{name}-host-*.json"))
    ]
    if not told:
        raise SpecError(
            "The processes of the rehearsal left no account of themselves",
            str(folder.logs),
            "Rehearse again: disttrain train --rehearse",
        )
    late_ms = np.concatenate([one["late_ms"] for one in told])
    operations = sum(one["operations"] for one in told)
    mean, p99, most = late_ms.mean(), np.quantile(late_ms, 0.99), late_ms.max()
    return {
        "late_ms": Late(mean=float(mean), p99=float(p99), max=float(most)),
        "operations_emulated": operations,
        "peak_mib": sum(one["peak_mib"] for one in told),
        "cpu_ms_per_operation": 1e3 * sum(one["cpu_s"] for one in told) / max(1, operations),
    }
