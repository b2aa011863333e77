"""FLOPs and predicted times of trace rows: the costs of a layout's stages, as SQL evaluates them.

A row's amount is base + per_item·items + per_token·tokens + per_length_sq·Σ length² at the row's
work.
"""

from __future__ import annotations

from typing import NamedTuple

from disttrain_cli.costs.flops import peak_tflops
from disttrain_cli.costs.layout import CostedStage, stages_of
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.trace import COMPUTE, Job


class StageCost(NamedTuple):
    """Cost of one module on one stage: FLOPs of one TP rank, and ms at the unit's TP size."""

    unit: str
    stage: int
    module: str
    kind: str
    operation: str
    flops_base: float
    flops_per_item: float
    flops_per_token: float
    flops_per_length_sq: float
    ms_base: float
    ms_per_item: float
    ms_per_token: float
    ms_per_length_sq: float


def known_stages(job: Job, warnings: list[str]) -> list[CostedStage]:
    """Return the stages of the job's layout; none, and a warning, if its profile lacks them."""
    left_out = "its FLOPs and predicted times are left out"
    for unit in job.layout.units:
        layers = [
            len(job.profile.modules[name].layers)
            for name in unit.modules
            if name in job.profile.modules
        ]
        if len(layers) < len(unit.modules) or sum(layers) != sum(unit.layers_per_stage):
            warnings.append(
                f"the profile in job.json does not describe the layers of unit {unit.name!r}:"
                f" {left_out}"
            )
            return []
    try:
        return stages_of(job.profile, job.layout)
    except SpecError as error:
        warnings.append(f"{error.what}: {left_out}")
        return []


def stage_costs(job: Job, stages: list[CostedStage]) -> list[StageCost]:
    """Return a row per (unit, stage, module, operation)."""
    rows = []
    for stage in stages:
        for cost in stage.costs:
            ranks = stage.unit.tp_cp_size // stage.unit.dealt_over(cost.module)
            operations = zip(COMPUTE, cost.parts_flops, cost.parts_ms, strict=True)
            rows += [
                StageCost(
                    stage.unit.name,
                    stage.index,
                    cost.module,
                    job.profile.modules[cost.module].kind,
                    operation,
                    *(flops / ranks).tolist(),
                    *times.tolist(),
                )
                for operation, flops, times in operations
            ]
    return rows


def shares_cores(job: Job) -> bool:
    """Return True if the ranks shared the cores of one CPU; emulated devices do not."""
    return job.profile.device.kind == "cpu" and job.rehearsed is None


def peak_of(job: Job, gpus: int) -> float:
    """Return the peak of `gpus` devices of the job, in TFLOP/s.

    An emulated CPU rank has its share during the measurement of the profile.
    """
    device = job.profile.device
    if device.kind == "cpu" and not shares_cores(job):
        return device.peak_tflops * gpus / max(device.cores, device.shared_by)
    return peak_tflops(device, gpus)
