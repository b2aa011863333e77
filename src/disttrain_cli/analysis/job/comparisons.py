"""Totals of prediction and measurement, by the plan and by the profile at the recorded sizes."""

from __future__ import annotations

from typing import Any

from disttrain_cli.analysis.job.costing import shares_cores
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.result.rows import Comparison, OperationRow
from disttrain_cli.spec.prediction import Prediction
from disttrain_cli.spec.trace import COMPUTE, WEIGHTS


def compare_sums(
    database: Database,
    times: dict[str, Any],
    operations: list[OperationRow],
    bubble: float,
    mfu: float | None,
) -> list[Comparison]:
    """Compare figures of the job and its units; empty without a job.json.

    Args:
        database: open traces.
        times: row of `queries/iterations.sql`.
        operations: `compare_operations` of the same traces.
        bubble, mfu: measured values.
    """
    job = database.job
    if job is None:
        return []
    rows: list[Comparison] = []

    def add(
        what: str,
        unit: str | None,
        basis: str,
        predicted: float | None,
        measured: float | None,
        measure: str,
    ) -> None:
        if predicted and measured is not None:
            rows.append(
                Comparison(
                    what=what,
                    unit=unit,
                    basis=basis,
                    predicted=predicted,
                    measured=measured,
                    measure=measure,
                    error_pct=100 * (measured - predicted) / predicted,
                )
            )

    plan, iteration_s = job.predicted, times["iteration_s"]
    add("iteration_s", None, "plan", plan.iteration_s, iteration_s, "s")
    if operations:
        add("iteration_s", None, "same work", operations[0].predicted / 1e3, iteration_s, "s")
    add(
        "sequences_per_s",
        None,
        "plan",
        plan.sequences_per_s,
        job.layout.global_batch_size / iteration_s,
        "1/s",
    )
    add("mfu", None, "plan", plan.mfu_used or plan.mfu, mfu, "fraction")
    add("bubble_fraction", None, "plan", plan.bubble_fraction, bubble, "fraction")
    sharing = {time.unit: time.sharing if shares_cores(job) else 1.0 for time in plan.units}
    for unit in job.layout.units:
        of_unit = [row for row in operations if row.unit == unit.name and row.operation in COMPUTE]
        computed = (
            COMPUTE
            if any(delay is not None for delay in unit.weight_delay or ())
            else COMPUTE[:WEIGHTS]
        )
        for what in (*computed, "stage") if of_unit else ():
            if unit.name in sharing:
                planned_ms = sharing[unit.name] * _planned_ms(plan, unit.name, what)
                add(
                    f"{what}_ms",
                    unit.name,
                    "plan",
                    planned_ms,
                    _of_unit(of_unit, what, "measured"),
                    "ms",
                )
            add(
                f"{what}_ms",
                unit.name,
                "same work",
                _of_unit(of_unit, what, "predicted"),
                _of_unit(of_unit, what, "measured"),
                "ms",
            )
    return rows


def _of_unit(rows: list[OperationRow], what: str, column: str) -> float:
    """Return a unit's time of an operation for one slot, summed over stages.

    For "stage" it is that of its slowest stage, all operations together.
    """
    if what != "stage":
        return sum(float(getattr(row, column)) for row in rows if row.operation == what)
    return max(
        sum(float(getattr(row, column)) for row in rows if row.stage == stage)
        for stage in {row.stage for row in rows}
    )


def _planned_ms(predicted: Prediction, unit: str, operation: str) -> float:
    """Return the planned time of a unit's pass, mean over its replicas.

    For "stage" it is that of the slowest stage.
    """
    time = next(time for time in predicted.units if time.unit == unit)
    if operation != "stage":
        return float(getattr(time, f"{operation}_ms"))
    return max(
        (s.forward_ms + s.backward_ms + s.weights_ms for s in predicted.stages if s.unit == unit),
        default=time.stage_ms,
    )
