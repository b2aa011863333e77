"""The other strategies: GPUs in proportion to FLOPs (`distmm`), and the paper's relaxation (`paper`).

`megatron` needs no code of its own: it is the same search over one unit of all modules (`units.group`).
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.flops import flops_per_sequence
from disttrain_cli.planning.options import Options
from disttrain_cli.planning.search import Candidate, Found, divisors, search
from disttrain_cli.planning.units import Cluster, Unit

Floats = NDArray[np.float64]
GRID = 400  # points of the slowest stage's time at which the relaxation is evaluated
CASES = 24  # relaxed cases that are rounded; more only while none has fitted


def proportional(flops: list[float], gpus: int) -> list[int]:
    """GPUs of every unit in proportion to its FLOPs, at least one each; largest remainders first."""
    exact = [gpus * value / sum(flops) for value in flops]
    shares = [max(1, int(value)) for value in exact]
    while sum(shares) > gpus:
        shares[shares.index(max(shares))] -= 1
    order = sorted(range(len(flops)), key=lambda u: shares[u] - exact[u])
    for unit in itertools.islice(itertools.cycle(order), gpus - sum(shares)):
        shares[unit] += 1
    return shares


def distmm(units: list[Unit], cluster: Cluster, top: int = 1) -> Found:
    """DistMM's rule: GPUs follow FLOPs; inside its share every unit takes its best shape."""
    per_module = flops_per_sequence(units[0].profile)
    shares = proportional([sum(per_module[name] for name in unit.modules) for unit in units], cluster.gpus)
    return search(units, cluster, top, keep=lambda number, _, options: options.gpus <= shares[number])


def paper(units: list[Unit], cluster: Cluster, top: int = 1) -> Found:
    """The paper's method: per (TP, DP_lm) a convex problem in 1/x, 1/y, 1/z, then rounded to what is feasible.

    One sequence per LLM replica and slot (M = 1). The cases that seem best are rounded: every unit keeps its TP
    and at most its GPUs, DP divides the slot as in the paper. The best of the rounded ones is taken.
    """
    cases = sorted(_relaxed(units, cluster), key=lambda case: case[0])
    best: list[Candidate] = []
    combinations = 0
    for tried, (_, tps, dp, shares) in enumerate(cases):
        if tried >= CASES and best:
            break

        def keep(number: int, size: int, options: Options, tps: tuple[int, ...] = tps, dp: int = dp,
                 shares: Floats = shares) -> NDArray[np.bool_]:
            fits = (options.tp == tps[number]) & (options.gpus <= shares[number])
            return fits & ((options.dp == dp) if units[number].holds_llm else (size % options.dp == 0))
        found = search(units, cluster, top, keep=keep, slots_of=[dp])
        best = sorted({*best, *found.best})[:top]
        combinations += found.combinations
    return Found(best, combinations)


def _relaxed(units: list[Unit], cluster: Cluster) -> list[tuple[float, tuple[int, ...], int, Floats]]:
    """Every case as (relaxed time in ms, TP of every unit, DP_lm, GPUs of every unit as real numbers).

    With a = DP_lm·TP·C GPU·ms per slot, unit u on x GPUs takes a/x per slot. For a slowest stage of τ every x is
    at least a/τ (and what its states need); τ is at least what one GPU per layer, replica and shard takes. The LLM
    takes just a/τ, the others share the rest by √a, which minimises the warm-up. What is left is convex in τ and
    evaluated on a fine grid.
    """
    holder = next(index for index, unit in enumerate(units) if unit.holds_llm)
    others = [index for index in range(len(units)) if index != holder]
    cases: list[tuple[float, tuple[int, ...], int, Floats]] = []
    for dp in divisors(cluster.batch):
        for tps in itertools.product(*(unit.tps for unit in units)):
            per_sequence = np.array([sum(part.sum() for part in unit.layer_ms(tp))
                                     for unit, tp in zip(units, tps, strict=True)])
            work = dp * np.array(tps) * per_sequence
            least = np.array([_least_gpus(unit, tp, dp if unit.holds_llm else 1, cluster)
                              for unit, tp in zip(units, tps, strict=True)])
            if least.sum() > cluster.gpus:
                continue
            most = dp * np.array([tp * unit.layers for unit, tp in zip(units, tps, strict=True)])
            fastest = max(work.sum() / cluster.gpus, float((work / most).max()))
            slowest = fastest * np.geomspace(1.0, 100.0, GRID)
            gpus = np.maximum(work[None, :] / slowest[:, None], least)
            spare = cluster.gpus - gpus.sum(axis=1)
            if others:
                wanted = np.sqrt(work[others]) / np.sqrt(work[others]).sum()
                total = cluster.gpus - gpus[:, holder]
                short = np.maximum(0.0, wanted * total[:, None] - gpus[:, others])
                portion = short / np.maximum(short.sum(axis=1, keepdims=True), 1e-12)
                gpus[:, others] += portion * np.maximum(spare, 0.0)[:, None]
            warmup = per_sequence[holder] + (work[others] / gpus[:, others]).sum(axis=1)
            times = np.where(spare >= -1e-9, warmup + (cluster.batch // dp - 1) * slowest, np.inf)
            best = int(times.argmin())
            if np.isfinite(times[best]):
                cases.append((float(times[best]), tps, dp, gpus[best] + 1e-9))
    return cases


def _least_gpus(unit: Unit, tp: int, dp: int, cluster: Cluster) -> int:
    """GPUs that a unit's weights, gradients and optimizer states take at least."""
    kept, shared = unit.states_gib
    stages = np.ceil((kept.sum() + shared.sum() / dp) / tp / cluster.memory_gib)
    return tp * dp * max(1, int(stages))
