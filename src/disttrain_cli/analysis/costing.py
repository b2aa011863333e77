"""FLOPs and predicted times of trace rows: the profile's polynomials summed over the layers of each stage.

Polynomials are linear in their coefficients, so the layers of one module on one stage add up to one row, and
SQL evaluates it at the work of every trace row: base + per_item·items + per_token·tokens + per_length_sq·Σ length².
"""

from __future__ import annotations

from typing import NamedTuple

from disttrain_cli.spec.profile import Polynomial
from disttrain_cli.spec.trace import Job


class StageCost(NamedTuple):
    """One module on one stage of a unit: FLOPs of one TP rank, and time in ms at the unit's TP size."""

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


def stage_costs(job: Job, warnings: list[str]) -> list[StageCost]:
    """A row per (unit, stage, module, forward or backward); what the profile does not know is said in `warnings`."""
    rows: list[StageCost] = []
    for unit in job.layout.units:
        unknown = [module for module in unit.modules if module not in job.profile.modules]
        layers = [
            (module, kind)
            for module in unit.modules
            if module not in unknown
            for kind in job.profile.modules[module].layers
        ]
        if unknown or len(layers) != sum(unit.layers_per_stage):
            warnings.append(
                f"the profile in job.json does not describe the layers of unit {unit.name!r}: "
                "its FLOPs and predicted times are left out"
            )
            continue
        start = 0
        for stage, count in enumerate(unit.layers_per_stage):
            placed = layers[start : start + count]
            start += count
            for module in dict.fromkeys(name for name, _ in placed):
                costs = [job.profile.modules[module].costs[kind] for name, kind in placed if name == module]
                times = [cost.tp.get(str(unit.tp)) for cost in costs]
                known = [time for time in times if time is not None]
                for operation in ("forward", "backward"):
                    flops = _sum([getattr(cost, f"{operation}_flops") for cost in costs], 1 / unit.tp)
                    ms = _sum([getattr(time, f"{operation}_ms") for time in known], 1.0)
                    rows.append(
                        StageCost(
                            unit.name,
                            stage,
                            module,
                            job.profile.modules[module].kind,
                            operation,
                            *flops,
                            *(ms if len(known) == len(times) else (0.0,) * 4),
                        )
                    )
    return rows


def _sum(polynomials: list[Polynomial], factor: float) -> tuple[float, float, float, float]:
    return (
        factor * sum(p.base for p in polynomials),
        factor * sum(p.per_item for p in polynomials),
        factor * sum(p.per_token for p in polynomials),
        factor * sum(p.per_length_sq for p in polynomials),
    )
