"""Planners with a rule of their own: GPUs by FLOPs (DistMM), the relaxation of DistTrain's paper.

Every module is a unit, and neither has CP.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.flops import module_flops
from disttrain_cli.planning.bounds import divisors
from disttrain_cli.planning.layouts import layout_of
from disttrain_cli.planning.options import Columns, Rows, layer_gib
from disttrain_cli.planning.partition import fewest_stages
from disttrain_cli.planning.predict import predict
from disttrain_cli.planning.search import Candidate, SearchResult, search
from disttrain_cli.planning.units import Cluster, Unit, groupings, holder_of, units_after
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.prediction import Prediction
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.shape import ParallelShape

Floats = NDArray[np.float64]
Rule = Literal["distmm", "paper"]
GRID = 400  # points of the slowest stage's time at which the relaxation is evaluated
CASES = 32  # relaxed cases that are rounded; more only while none has fitted


def proportional(flops: list[float], gpus: int) -> list[int]:
    """GPUs of every unit in proportion to its FLOPs, at least one each; largest remainders
    first."""
    exact = [gpus * value / sum(flops) for value in flops]
    shares = [max(1, int(value)) for value in exact]
    while sum(shares) > gpus:
        shares[shares.index(max(shares))] -= 1
    order = sorted(range(len(flops)), key=lambda u: shares[u] - exact[u])
    for unit in itertools.islice(itertools.cycle(order), gpus - sum(shares)):
        shares[unit] += 1
    return shares


def by_rule(
    profile: Profile, cluster: Cluster, rule: Rule, top: int = 1
) -> tuple[list[Unit], SearchResult]:
    """A unit for each module, and the best layouts of a rule, by the formula.

    Raises:
        InfeasibleError: a unit has no TP degree that fits a node.
    """
    units = groupings(profile, replace(cluster, most_cp=1, most_ep=1), "disaggregated")[0]
    return units, (distmm if rule == "distmm" else paper)(units, cluster, top)


def planned_by(profile: Profile, cluster: Cluster, rule: Rule) -> tuple[Layout, Prediction] | None:
    """The best layout of a rule, and its prediction; None where none fits."""
    units, result = by_rule(profile, cluster, rule)
    if not result.best:
        return None
    layout = layout_of(units, cluster, result.best[0], "disaggregated")
    return layout, predict(units, layout, cluster)


def distmm(units: list[Unit], cluster: Cluster, top: int = 1) -> SearchResult:
    """DistMM's rule: GPUs follow FLOPs; inside its share every unit takes its best shape."""
    profile = units[0].profile
    per_module = {
        name: module_flops(profile, name, module.work_per_sequence, cluster.trained)
        for name, module in profile.modules.items()
    }
    shares = proportional(
        [sum(per_module[name] for name in unit.modules) for unit in units], cluster.gpus
    )
    return search(units, cluster, top, shares=shares)


def paper(units: list[Unit], cluster: Cluster, top: int = 1) -> SearchResult:
    """The paper's method: per (TP, DP_lm) a convex problem in 1/x, 1/y, 1/z, then rounded to what
    is feasible.

    One sequence per LLM replica and slot (M = 1). The cases that seem best are rounded: every unit
    keeps its TP and at most its GPUs, DP divides the slot as in the paper. The best of the rounded
    ones is taken.
    """
    cases = sorted(_relaxed(units, cluster), key=lambda case: case[0])
    best: list[Candidate] = []
    combinations = 0
    for tried, (relaxed_ms, tps, dp, shares) in enumerate(cases):
        if best and (tried >= CASES or relaxed_ms > best[-1].total_ms):
            break

        def keep(
            number: int, size: int, rows: Rows, tps: tuple[int, ...] = tps, dp: int = dp
        ) -> NDArray[np.bool_]:
            fits = rows.tp == tps[number]
            return fits & ((rows.dp == dp) if units[number].holds_llm else (size % rows.dp == 0))

        result = search(
            units,
            cluster,
            top,
            keep=keep,
            slots_of=[dp],
            shares=[int(share) for share in shares],
            within_ms=best[-1].total_ms if len(best) == top else np.inf,
        )
        best = sorted({*best, *result.best})[:top]
        combinations += result.combinations
    return SearchResult(best, combinations)


def _relaxed(
    units: list[Unit], cluster: Cluster
) -> list[tuple[float, tuple[int, ...], int, Floats]]:
    """Every case as (relaxed time in ms, TP of every unit, DP_lm, GPUs of every unit as real
    numbers).

    With a = DP_lm·TP·C GPU·ms per slot, unit u on x GPUs takes a/x per slot. For a slowest stage of
    τ every x is at least a/τ (and what its memory needs); τ is at least what one GPU per layer,
    replica and shard takes. The LLM takes just a/τ, the others share the rest by √a, which
    minimises the warm-up; encoders side by side count as one unit, whose GPUs they share by a. What
    is left is convex in τ and evaluated on a fine grid.
    """
    holder, afters = holder_of(units), units_after(units)
    others = [index for index in range(len(units)) if index != holder]
    points = np.geomspace(1.0, 100.0, GRID)[:, None]
    times = [
        {tp: sum(part.sum() for part in unit.layer_ms(ParallelShape(tp=tp))) for tp in unit.tps}
        for unit in units
    ]
    cases: list[tuple[float, tuple[int, ...], int, Floats]] = []
    for dp in divisors(cluster.batch):
        needs = [
            _least_gpus(unit, dp, cluster.batch // dp, after)
            for unit, after in zip(units, afters, strict=True)
        ]
        for tps in itertools.product(*(unit.tps for unit in units)):
            least = np.array([need[tp] for need, tp in zip(needs, tps, strict=True)])
            if least.sum() > cluster.gpus:
                continue
            per_sequence = np.array([each[tp] for each, tp in zip(times, tps, strict=True)])
            work = dp * np.array(tps) * per_sequence
            most = dp * np.array([tp * unit.layers for unit, tp in zip(units, tps, strict=True)])
            fastest = max(work.sum() / cluster.gpus, float((work / most).max()))
            slowest = fastest * points[:, 0]
            gpus = np.maximum(work / fastest / points, least)
            spare = cluster.gpus - gpus.sum(axis=1)
            if others:
                root = np.sqrt(work)
                if holder:
                    root[:holder] = work[:holder] / max(work[:holder].sum() ** 0.5, 1e-300)
                wanted = root[others] / max(root[others].sum(), 1e-300)
                total = cluster.gpus - gpus[:, holder]
                short = np.maximum(0.0, wanted * total[:, None] - gpus[:, others])
                portion = short / np.maximum(short.sum(axis=1, keepdims=True), 1e-12)
                gpus[:, others] += portion * np.maximum(spare, 0.0)[:, None]
            each = work / gpus
            warmup = (
                per_sequence[holder]
                + each[:, :holder].max(axis=1, initial=0.0)
                + each[:, holder + 1 :].sum(axis=1)
            )
            steps = np.where(spare >= -1e-9, warmup + (cluster.batch // dp - 1) * slowest, np.inf)
            best = int(steps.argmin())
            if np.isfinite(steps[best]):
                cases.append((float(steps[best]), tps, dp, gpus[best] + 1e-9))
    return cases


def _least_gpus(unit: Unit, size: int, slots: int, later_units: int) -> dict[int, float]:
    """By TP, GPUs that a unit's memory takes at least, one sequence per LLM replica and slot; inf
    where none do."""
    kinds = unit.kinds
    dps = [size] if unit.holds_llm else divisors(size)
    variant, dp = (values.ravel() for values in np.meshgrid(np.arange(len(kinds.tp)), dps))
    stages = fewest_stages(
        np.zeros((len(dp), unit.layers)),
        *layer_gib(Columns(unit, variant, dp, size)),
        slots,
        later_units,
        np.zeros(len(dp)),
    )
    gpus = np.where(stages <= unit.layers, kinds.tp[variant] * dp * stages, np.inf)
    return {int(tp): float(gpus[kinds.tp[variant] == tp].min()) for tp in unit.tps}
