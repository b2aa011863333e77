"""Launcher of a rehearsal: starts the processes, and simulates the same steps that they ran."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from disttrain_cli.calls import call
from disttrain_cli.costs.layout import stages_of
from disttrain_cli.data.index.index_checks import check_profiled_data
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.errors import RankLostError, SpecError
from disttrain_cli.runtime.checkpoints.folder import latest
from disttrain_cli.runtime.launching.starts import (
    Reports,
    job_of,
    run_ranks,
    step_to_resume,
)
from disttrain_cli.runtime.launching.supervise import (
    Planned,
    Replanned,
    Replanner,
    Supervisor,
    merged,
    stop_request,
)
from disttrain_cli.runtime.rehearsal.emulation import EmulatedCluster
from disttrain_cli.runtime.rehearsal.feeding import rehearsed_index
from disttrain_cli.simulation.faults import check_faults
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.runfile import Run


class Late(BaseModel):
    """Start delays of emulated operations by the host, in ms of the host's clock."""

    mean: float
    p99: float
    max: float


class RehearsalResult(BaseModel):
    """Output of `train --rehearse --json`, apart from the comparison of operations."""

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
    restarts: list[str] = []  # reasons for restarts
    replans: list[Replanned] = []  # the restarts with another plan
    stopped_by: str | None = None  # the one of `watch.REASONS` that ended it before its last step


def rehearse(
    run: Run,
    plan: Plan,
    profile: Profile,
    *,
    now: Plan | None = None,
    steps: int | None = None,
    resume: bool = False,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress = silent,
    replanner: Replanner | None = None,
) -> RehearsalResult:
    """Rehearse the plan in `runs/NAME/rehearsal/`.

    The plan must have been checked against the run and profile (`planning.check`). Stopping and
    restarting work as in training; emulated devices always have the speed of `profile`.

    Args:
        plan: determines the location of faults, even if the rehearsal runs another plan.
        now: plan to run; None = `plan`.
        steps: None = the run file's `rehearse.steps`.

    Raises:
        SpecError: a fault names a location that the plan lacks, or there is nothing to resume from.
        MismatchError: the dataset or the checkpoint is not the one of the profile.
        RankFailedError: a process failed.
    """
    folder, total = run.dir.rehearsal, steps if steps is not None else run.file.rehearse.steps
    check_faults(stages_of(profile, plan.plan), run.file.rehearse.faults, profile)
    index = _checked_index(run, profile)
    cluster = EmulatedCluster(run, profile, index, plan, total)
    rows: list[dict[str, Any]] = []
    names: list[str] = []  # of successful starts

    def take(step: dict[str, Any]) -> None:
        rows.append(step)
        if on_step is not None:
            on_step(step)

    def start(planned: Planned, resume: bool, watch: Callable[[], None]) -> Reports:
        first = step_to_resume(run, profile, folder, total) if resume else 0
        progress("ordering the steps", 0, 0)
        emulation = cluster.start(planned.plan, first, _reached(rows))
        try:
            reports = run_ranks(
                folder,
                job_of(run, planned.plan, profile, cluster.rehearsed(emulation)),
                "disttrain_cli.runtime.rehearsal.worker:main",
                emulation.setting.processes,
                cluster.payload(emulation),
                steps=total,
                resume=resume,
                on_step=take,
                progress=progress,
                watch=watch,
                wait=lambda: request.end_before_ranks(progress),
            )
        except RankLostError as error:
            error.rank = None if error.rank is None else emulation.rank_of(error.rank)
            raise
        names.append(reports.name)
        return reports

    resumed = step_to_resume(run, profile, folder, total) if resume else None
    with stop_request() as request:
        went = Supervisor(
            folder,
            Planned(now or plan, profile),
            run.file.train.restarts,
            run.file.train.longest_hang_s,
            request,
            progress,
            lambda: len(rows),
            replanner,
        ).run(resume, start)
    progress("simulating the same steps", 0, 0)
    rows, last = merged(rows), cluster.starts[-1]
    return RehearsalResult(
        run_dir=str(folder.root),
        processes=last.setting.processes,
        gpus=last.plan.plan.gpus_used,
        gpus_per_process=last.setting.gpus_per_process,
        time_scale=last.setting.time_scale,
        messages=run.file.rehearse.messages,
        steps=[_step(row) for row in rows],
        simulated=cluster.simulated([row["step"] for row in rows]),
        predicted_iteration_s=last.plan.predicted.iteration_s,
        **_host(folder, names[-1]),
        checkpoint=str(latest(folder.checkpoints)),
        trace=str(folder.traces),
        resumed_from_step=resumed,
        restarts=went.restarts,
        replans=went.replans,
        stopped_by=went.stopped,
    )


def _reached(rows: list[dict[str, Any]]) -> int:
    """Return the first step that no start has finished."""
    return max((row["step"] + 1 for row in rows), default=0)


def _step(row: dict[str, Any]) -> dict[str, Any]:
    """Return a reported step without the fields that an emulated model lacks."""
    return {key: value for key, value in row.items() if key not in ("loss", "losses", "grad_norm")}


def _checked_index(run: Run, profile: Profile) -> Index:
    index = rehearsed_index(run, profile.inputs)
    if run.file.rehearse.distribution is None:
        check_profiled_data(index.fingerprint, profile)
    return index


def _host(folder: RunDir, name: str) -> dict[str, Any]:
    """Return the processes' measurements of the emulation itself."""
    reports = [
        json.loads(path.read_text())
        for path in sorted(Path(folder.logs).glob(f"{name}-host-*.json"))
    ]
    if not reports:
        raise SpecError(
            "The processes of the rehearsal wrote no measurements",
            str(folder.logs),
            f"Rehearse again: {call('rehearse')}",
        )
    late_ms = np.concatenate([one["late_ms"] for one in reports])
    operations = sum(one["operations"] for one in reports)
    mean, p99, most = late_ms.mean(), np.quantile(late_ms, 0.99), late_ms.max()
    return {
        "late_ms": Late(mean=float(mean), p99=float(p99), max=float(most)),
        "operations_emulated": operations,
        "peak_mib": sum(one["peak_mib"] for one in reports),
        "cpu_ms_per_operation": 1e3 * sum(one["cpu_s"] for one in reports) / max(1, operations),
    }
