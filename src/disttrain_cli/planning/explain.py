"""Why this plan: plain data and short sentences for rendering."""

from __future__ import annotations

from dataclasses import dataclass

from disttrain_cli.spec.plan import Plan


@dataclass(frozen=True)
class UnitShare:
    """One unit beside the slowest one."""

    unit: str
    gpus: int
    forward_ms: float  # the whole unit for one slot
    backward_ms: float
    stage_ms: float  # its slowest stage for one slot
    of_slowest_fraction: float  # its slowest stage over the pipeline's
    memory_fraction: float  # of its fullest stage


@dataclass(frozen=True)
class Explanation:
    """What a plan's time is made of, what binds, and why others lose."""

    units: list[UnitShare]
    binding_unit: str
    time: list[str]
    runners_up: list[str]
    baselines: list[str]


def explain(plan: Plan) -> Explanation:
    """Explain a plan from its own numbers."""
    predicted, layout = plan.predicted, plan.plan
    slowest = max(predicted.units, key=lambda unit: unit.stage_ms)
    shares = []
    for unit, times in zip(layout.units, predicted.units, strict=True):
        memory = max(m.peak_gib / m.limit_gib for m in predicted.memory if m.unit == unit.name)
        fraction = times.stage_ms / slowest.stage_ms if slowest.stage_ms else 0.0
        shares.append(UnitShare(unit.name, unit.gpus, times.forward_ms, times.backward_ms, times.stage_ms, fraction,
                                memory))
    formula = predicted.warmup_s + predicted.steady_s
    time = [
        f"The slowest stage is one of unit {slowest.unit}: {slowest.stage_ms:.3g} ms per slot, "
        f"{layout.microbatches} slots per step.",
        f"Warm-up {predicted.warmup_s:.3g} s ({100 * predicted.warmup_s / formula:.0f} %) + steady "
        f"{predicted.steady_s:.3g} s = {formula:.3g} s by the formula, each rank on a device of its own.",
        f"Simulated with transfers, gradient reduction and shared devices: {predicted.iteration_s:.3g} s, "
        f"{100 * predicted.bubble_fraction:.0f} % of the ranks' time not computing.",
    ]
    runners_up = [f"{other.layout} on {other.gpus_used} GPUs: {_slower(other.slower_pct)} by the formula"
                  for other in plan.alternatives]
    if any(unit.sharing != 1.0 for unit in predicted.units):
        time.append("Ranks share cores here, which levels the simulated times; the choice is the formula's, as for a "
                    "cluster.")
    baselines = [f"{name}: {_compared(other.iteration_s / predicted.iteration_s)} ({other.layout})"
                 if other else f"{name}: no such layout fits" for name, other in plan.baselines.items()]
    return Explanation(shares, slowest.unit, time, runners_up, baselines)


def _slower(percent: float) -> str:
    return "equally fast, not simpler and on no fewer GPUs" if percent < 0.005 else f"{percent:.3g} % slower"


def _compared(ratio: float) -> str:
    return f"takes {ratio:.3g} × the time of this plan"
