"""Where prediction and measurement part, operation by operation.

Every operation of a step beside what the plan expected of it (mean data), and what the profile
expects for the very work that was recorded: the first difference is the data's, the second the
profile's or the machine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from disttrain_cli.analysis.job.costing import shares_cores
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.job.recorded import expected_s, recorded_pipelines, waited_transfers
from disttrain_cli.analysis.result.rows import OperationRow
from disttrain_cli.costs.layout import CostedStage, optimizer_s, reduce_s, transfers_s
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.spec.stage_graph import cuts_of
from disttrain_cli.spec.trace import COMPUTE, Job


def compare_operations(database: Database) -> list[OperationRow]:
    """The iteration, then all operations, those first whose error moves the step of their rank
    most.

    A rank that computes is slowed by what shares its cores as the plan expects; none without
    job.json.
    """
    job = database.job
    if job is None or not database.stages:
        return []
    step_ms = 1e3 * database.query("iterations")[0]["iteration_s"]
    rows = [*_passes(database, job), *_transfers(database, job), *_updates(database, job)]
    comparisons = [_row(step_ms, **row) for row in rows]
    comparisons.sort(key=lambda row: -abs(row.effect_ms))
    expected = expected_s(database)
    whole = _row(
        step_ms,
        unit=None,
        operation="iteration",
        planned=1e3 * job.predicted.iteration_s,
        predicted=1e3 * float(np.mean(list(expected.values()))),
        measured=step_ms,
    )
    return [whole, *comparisons]


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
    """Forward and backward of every module of a stage; waiting for data and handing over, which
    should take no time."""
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
    """One crossing of every cut, either way, where a rank waited for it; named by the stage before
    the cut."""
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
    """Reduction of gradients and optimizer step of every stage; where messages run behind passes,
    what is left of the reduction when these end. Ranks that share cores hide nothing, as in their
    plans."""
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
        for stage in database.stages
        for operation, predicted_s in cost.items()
        if (stage.unit.name, stage.index, operation) in measured
    ]


def _left_s(database: Database) -> list[float]:
    """By stage, from the end of its last pass to that of its reduction: mean over the recorded
    steps, as the profile expects them."""
    rows = []
    for pipeline in recorded_pipelines(database).values():
        timeline = simulate(pipeline)
        passes = [timeline.backward_end, timeline.weight_end]
        last_s = np.fmax.reduce([ends[-1] for ends in passes if ends is not None])
        reduced_s = np.nanmax(last_s + pipeline.exposed_s, axis=1)
        rows.append(reduced_s - np.nanmax(last_s, axis=1))
    left_s: list[float] = np.mean(rows, axis=0).tolist()
    return left_s
