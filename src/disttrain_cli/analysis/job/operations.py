"""Comparison of prediction and measurement, operation by operation.

Every operation of a step has a planned time (mean data) and the time that the profile predicts for
exactly the recorded work: the first difference is due to the data, the second to the profile or the
machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from disttrain_cli.analysis.job.costing import shares_cores
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.job.recorded import expected_s, recorded_pipelines, waited_transfers
from disttrain_cli.analysis.result.rows import OperationRow
from disttrain_cli.costs.layout import CostedStage, by_device, optimizer_s, reduce_s, transfers_s
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.spec.stage_graph import cuts_of
from disttrain_cli.spec.trace import COMPUTE, Job


def compare_operations(database: Database) -> list[OperationRow]:
    """Return the iteration, then all operations, those whose error has the largest effect first.

    The effect is that on the step of the operation's rank. A rank on shared cores is slowed by as
    much as the plan predicts. Empty without job.json.
    """
    job = database.job
    if job is None or not database.stages:
        return []
    step_ms = 1e3 * database.query("iterations")[0]["iteration_s"]
    rows = [*_passes(database, job), *_transfers(database, job), *_updates(database, job)]
    comparisons = [_row(step_ms, **row) for row in rows]
    comparisons.sort(key=lambda row: -abs(row.effect_ms))
    expected = expected_s(database)
    step_row = _row(
        step_ms,
        unit=None,
        operation="iteration",
        planned=1e3 * job.predicted.iteration_s,
        predicted=1e3 * float(np.mean(list(expected.values()))),
        measured=step_ms,
    )
    return [step_row, *comparisons]


def _row(
    step_ms: float,
    *,
    unit: str | None,
    operation: str,
    predicted: float,
    measured: float,
    planned: float | None = None,
    stage: int | None = None,
    module: str | None = None,
    per_step: float = 1.0,
) -> OperationRow:
    return OperationRow(
        unit=unit,
        stage=stage,
        module=module,
        operation=operation,
        planned=planned,
        predicted=predicted,
        measured=measured,
        measure="ms",
        error_pct=100 * (measured - predicted) / predicted if predicted else None,
        per_step=per_step,
        share_of_step=measured * per_step / step_ms,
    )


def _passes(database: Database, job: Job) -> list[dict[str, Any]]:
    """Return forward and backward of every module of a stage, and waits for data and handovers.

    The waits and handovers should take no time.
    """
    alone = {(stage.unit.name, stage.index): len(stage.costs) == 1 for stage in database.stages}
    planned = {
        (time.unit, time.stage): {what: getattr(time, f"{what}_ms") for what in COMPUTE}
        for time in job.predicted.stages
    }
    sharing = {time.unit: time.sharing for time in job.predicted.units} if shares_cores(job) else {}
    rows = []
    for row in database.query("operation_means"):
        key, factor = (row["unit"], row["stage"]), sharing.get(row["unit"], 1.0)
        computes = row["operation"] in COMPUTE
        if key not in alone or (computes and row["predicted_ms"] is None):
            continue
        plan = planned.get(key, {}).get(row["operation"]) if alone[key] else None
        rows.append(
            {
                "unit": row["unit"],
                "stage": row["stage"],
                "module": row["module"],
                "operation": row["operation"],
                "planned": None if plan is None else factor * plan,
                "predicted": factor * row["predicted_ms"] if computes else 0.0,
                "measured": row["measured_ms"],
                "per_step": row["per_step"],
            }
        )
    return rows


def _transfers(database: Database, job: Job) -> list[dict[str, Any]]:
    """Return one crossing of every cut, either way, if a rank waited for it.

    A cut is named by the stage before it.
    """
    stages = database.stages
    numbers = cuts_of(stages)
    times = dict(
        zip(
            numbers,
            transfers_s(job.profile, job.layout, stages, job.gpus_per_node).tolist(),
            strict=True,
        )
    )
    return [
        {
            "unit": stages[row["before"]].unit.name,
            "stage": stages[row["before"]].index,
            "operation": "transfer_activation"
            if row["direction"] == "forward"
            else "transfer_gradient",
            "predicted": 1e3 * times[row["before"], row["after"]],
            "measured": row["measured_ms"],
            "per_step": row["per_step"],
        }
        for row in waited_transfers(database)
    ]


def _updates(database: Database, job: Job) -> list[dict[str, Any]]:
    """Return gradient reduction and optimizer step of every stage.

    If messages overlap with passes, only the exposed rest of the reduction counts. Ranks on shared
    cores overlap nothing, as in their plans.
    """
    cost: dict[str, Callable[[CostedStage], float]] = {
        "reduce": lambda stage: reduce_s(job.profile, job.layout, stage, job.gpus_per_node),
        "step": lambda stage: optimizer_s(job.profile, job.layout, stage, job.gpus_per_node),
    }
    if job.layout.overlap and not shares_cores(job):
        left_s = _left_s(database)
        cost = {"reduce": lambda stage: left_s[stage.number]}
    measured = {
        (row["unit"], row["stage"], row["operation"]): row["measured_ms"]
        for row in database.query("updates")
    }
    return [
        {
            "unit": stage.unit.name,
            "stage": stage.index,
            "operation": operation,
            "predicted": 1e3 * predicted_s(stage),
            "measured": measured[stage.unit.name, stage.index, operation],
        }
        for stage in by_device(database.stages)
        for operation, predicted_s in cost.items()
        if (stage.unit.name, stage.index, operation) in measured
    ]


def _left_s(database: Database) -> list[float]:
    """Return, by stage, the predicted time from the end of its last pass to that of its reduction.

    It is the mean over the recorded steps.
    """
    rows = []
    for pipeline in recorded_pipelines(database).values():
        timeline = simulate(pipeline)
        passes = [timeline.backward_end, timeline.weight_end]
        last_s = np.fmax.reduce([ends[-1] for ends in passes if ends is not None])
        reduced_s = np.nanmax(last_s + pipeline.exposed_s, axis=1)
        rows.append(reduced_s - np.nanmax(last_s, axis=1))
    left_s: list[float] = np.mean(rows, axis=0).tolist()
    return left_s
