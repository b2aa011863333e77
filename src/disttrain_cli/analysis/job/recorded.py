"""Recorded steps as input of the simulator: the profile's times for the work of every replica."""

from __future__ import annotations

from typing import Any

import numpy as np

from disttrain_cli.analysis.job.costing import shares_cores
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.walk import Floats
from disttrain_cli.costs.layout import crossings
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.shared_cores import simulate_shared
from disttrain_cli.simulation.step import pipeline_of
from disttrain_cli.simulation.timeline import Pipeline

#: Most steps that are replayed and simulated, spread evenly over the measured ones.
MOST_STEPS = 32


def chosen_steps(database: Database) -> list[int]:
    """Return numbers of the measured steps, at most `MOST_STEPS` of them."""
    steps = [
        int(row["step"])
        for row in database.sql("SELECT step FROM windows WHERE measured ORDER BY step")
    ]
    if len(steps) <= MOST_STEPS:
        return steps
    return [steps[index] for index in np.linspace(0, len(steps) - 1, MOST_STEPS).astype(int)]


def waited_transfers(database: Database) -> list[dict[str, Any]]:
    """Return the transfer times over every cut at which a rank waited (`queries/transfers.sql`)."""
    number = {stage.name: depth for depth, stage in enumerate(database.stages)}
    cuts = crossings(database.stages)
    if cuts:
        return database.query(
            "transfers",
            steps=chosen_steps(database),
            before=[number[before.name] for before, _ in cuts],
            after=[number[after.name] for _, after in cuts],
            crosses=[before.unit.name != after.unit.name for before, after in cuts],
        )
    return []


def recorded_loads(database: Database) -> tuple[list[int], dict[str, Floats]]:
    """Return the chosen steps, and by module [steps, n slots, DP, 3] the work of every replica.

    Without job.json there are no modules.
    """
    job, steps = database.job, chosen_steps(database)
    if job is None:
        return steps, {}
    rows = database.columns("loads", steps=steps)
    loads = {
        module: np.zeros((len(steps), job.layout.microbatches, unit.dp, 3))
        for unit in job.layout.units
        for module in unit.modules
    }
    index = np.searchsorted(steps, rows["step"])
    work = np.stack(
        [np.asarray(rows[name], dtype=float) for name in ("items", "tokens", "sum_length_sq")],
        axis=1,
    )
    for module, load in loads.items():
        mask = (
            (rows["module"] == module)
            & (rows["slot"] < load.shape[1])
            & (rows["replica"] < load.shape[2])
        )
        load[index[mask], rows["slot"][mask], rows["replica"][mask]] = work[mask]
    return steps, loads


def recorded_pipelines(database: Database) -> dict[int, Pipeline]:
    """Return the simulator's input for the recorded work of each step; empty without stages."""
    job = database.job
    if job is None or not database.stages:
        return {}
    steps, loads = recorded_loads(database)
    return {
        step: pipeline_of(
            job.profile,
            job.layout,
            database.stages,
            {module: load[number] for module, load in loads.items()},
            job.gpus_per_node,
        )
        for number, step in enumerate(steps)
    }


def expected_s(database: Database) -> dict[int, float]:
    """Return the seconds of each step that the simulator predicts for the recorded work."""
    job = database.job
    if job is None:
        return {}
    device, pipelines = job.profile.device, recorded_pipelines(database)
    if shares_cores(job):
        return {
            step: simulate_shared(pipeline, device.cores, device.shared_by).iteration_s
            for step, pipeline in pipelines.items()
        }
    return {step: simulate(pipeline).iteration_s for step, pipeline in pipelines.items()}
