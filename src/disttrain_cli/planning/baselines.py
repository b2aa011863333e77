"""The other strategies: one TP and DP for all (`megatron`), GPUs by FLOPs (`distmm`), the paper's
relaxation (`paper`).

In a Megatron pipeline encoder and generator are one stage each, on as many GPUs as a stage of the
LLM. They are sharded over the TP group, which is the search over one unit of all modules
(`units.group`), or replicated over it, each copy working on other images: units of their own, with
DP as large as the LLM's TP · DP.

Megatron-LM has context parallelism, so here the LLM may have it, too: units without it then have
the ranks of its CP groups as replicas. DistMM and the paper's method know none.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.flops import flops_per_sequence
from disttrain_cli.planning.bounds import divisors
from disttrain_cli.planning.options import (
    Rows,
    kind_ms,
    layer_gib,
    list_rows,
    options_of,
    price,
    slowest_by_stages,
    take,
)
from disttrain_cli.planning.partition import fewest_stages
from disttrain_cli.planning.search import (
    Candidate,
    SearchResult,
    Shape,
    candidate_of,
    search,
    shape_of,
)
from disttrain_cli.planning.units import Cluster, Unit, group, holder_of, units_after
from disttrain_cli.spec.plan import Strategy, UnitShape
from disttrain_cli.spec.profile import Profile

Floats = NDArray[np.float64]
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


def candidates(
    profile: Profile, cluster: Cluster, strategy: Strategy, top: int
) -> tuple[list[Unit], SearchResult]:
    """Units of a strategy and its best layouts by the formula.

    Raises:
        InfeasibleError: a unit has no TP degree that fits a node.
    """
    if strategy == "megatron":
        return megatron(profile, cluster, top)
    units = group(profile, cluster, strategy)
    if strategy == "distmm":
        return units, distmm(units, cluster, top)
    if strategy == "paper":
        return units, paper(units, cluster, top)
    return units, search(units, cluster, top)


def megatron(
    profile: Profile,
    cluster: Cluster,
    top: int = 1,
    tp: int | None = None,
    pp: int | None = None,
    most_dp: int | None = None,
) -> tuple[list[Unit], SearchResult]:
    """The best Megatron pipeline: encoders and generators sharded, or some of them replicated,
    whichever is faster.

    Args:
        tp, pp: TP of all, and the LLM's PP; None = the best.
        most_dp: ranks with the same weights of the LLM at most.
    """
    forms: list[tuple[list[Unit], SearchResult]] = []
    for strategy in ("megatron", "disaggregated"):
        units = group(profile, cluster, strategy)
        stages = None if pp is None else pp + sum(len(unit.fences) for unit in units)
        forms.append((units, pipelines(units, cluster, top, tp, stages, most_dp)))
    return min(forms, key=lambda form: (not form[1].best, form[1].best))


def pipelines(
    units: list[Unit],
    cluster: Cluster,
    top: int = 1,
    tp: int | None = None,
    pp: int | None = None,
    most_dp: int | None = None,
) -> SearchResult:
    """Pipelines whose stages all have the LLM's TP · CP · DP GPUs; units without the LLM are one
    stage each. Exact.

    Shapes of the LLM's unit come in the order of a lower bound, so few of them are priced.
    """
    holder, afters = holder_of(units), units_after(units)
    llm, later = units[holder], afters[holder]
    found: list[Floats] = []  # [9, B] each
    for size in divisors(cluster.batch):
        slots = cluster.batch // size
        rows = list_rows(llm, size, slots, cluster.gpus, later)
        stages = np.arange(1, llm.layers + 1)[:, None]
        fits = ((stages + len(units) - 1) * rows.stage_gpus <= cluster.gpus) & (
            stages >= rows.least_stages
        )
        fits &= (
            (stages == (pp or stages))
            & (rows.tp == (tp or rows.tp))
            & (rows.cp * rows.dp <= (most_dp or cluster.gpus))
        )
        beside = np.zeros((len(units), len(rows)))  # the LLM's own row stays zero
        for number in range(len(units)):
            if number != holder:
                beside[number] = _least_beside(units[number], rows, size)
        slowest_ms = np.maximum(rows.slowest_ms(stages), beside.max(axis=0))
        warmup_ms = (
            rows.unit_ms + beside[:holder].max(axis=0, initial=0.0) + beside[holder:].sum(axis=0)
        )
        least = warmup_ms + (slots - 1) * slowest_ms
        stage, row = np.nonzero(fits)
        found.append(
            np.stack(
                [
                    least[stage, row],
                    np.full(len(row), size),
                    rows.tp[row],
                    rows.dp[row],
                    stage + 1,
                    rows.checkpointing[row],
                    rows.cp[row],
                    rows.gathers[row],
                    rows.unit_ms[row],
                ]
            )
        )
    columns = np.concatenate(found, axis=1)
    best: list[Candidate] = []
    for place in np.lexsort(columns[::-1]):
        least_ms, *numbers, unit_ms = columns[:, place].tolist()
        size, degree, dp, stages_ = map(int, numbers[:4])
        recomputes, cp, gathers = bool(numbers[4]), int(numbers[5]), bool(numbers[6])
        if len(best) == top and least_ms > best[-1].total_ms:
            break
        slots = cluster.batch // size
        llm_shape = UnitShape(degree, dp, stages_, recomputes, cp, gathers)
        slowest = slowest_by_stages(
            llm, degree, cp, gathers, dp, recomputes, size, slots, later, cluster.gpus
        )
        chosen: list[Shape] = []
        for number, unit in enumerate(units):
            after = afters[number] + (stages_ - 1 if number < holder else 0)
            shape = (
                _one_stage(unit, degree, llm_shape.holders, size, slots, after)
                if number != holder
                else Shape(llm_shape, unit_ms, float(slowest[stages_]))
            )
            chosen += [shape] if shape is not None and np.isfinite(shape.stage_ms) else []
        if len(chosen) == len(units):
            best = sorted([*best, candidate_of(chosen, size, slots, holder)])[:top]
    return SearchResult(best, columns.shape[1])


def _least_beside(unit: Unit, rows: Rows, size: int) -> Floats:
    """[B] least time of a unit on one stage beside each row of the LLM, memory aside."""
    kinds, least = unit.kinds, np.full(len(rows), np.inf)
    for variant, width in enumerate(kinds.width):
        for dp in (rows.cp * rows.dp, rows.stage_gpus):
            possible = width * dp == rows.stage_gpus
            times = kind_ms(unit, np.full(len(rows), variant), dp, size) @ kinds.count
            least = np.where(possible, np.minimum(least, times), least)
    return least


def _one_stage(unit: Unit, tp: int, dp: int, size: int, slots: int, after: int) -> Shape | None:
    """A unit on one stage of TP · DP GPUs, sharded or replicated, whichever is faster of those that
    fit."""
    rows = list_rows(unit, size, slots, tp * dp, 0)
    sharded, replicated = (rows.tp == tp) & (rows.dp == dp), rows.dp == tp * dp
    row = np.flatnonzero((rows.cp == 1) & (sharded | ((rows.tp == 1) & replicated)))
    options = options_of(rows, row, np.ones(len(row), dtype=np.int64))
    fits = price(unit, options, size, slots, np.array([after]), np.full(len(row), np.inf))
    fits = take(fits, fits.after_to > after)
    if not len(fits):
        return None
    return shape_of(fits, int(fits.unit_ms.argmin()))


def distmm(units: list[Unit], cluster: Cluster, top: int = 1) -> SearchResult:
    """DistMM's rule: GPUs follow FLOPs; inside its share every unit takes its best shape."""
    per_module = flops_per_sequence(units[0].profile, cluster.trained)
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
        {tp: sum(part.sum() for part in unit.layer_ms(tp)) for tp in unit.tps} for unit in units
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
        *layer_gib(unit, variant, dp, size),
        slots,
        later_units,
        np.zeros(len(dp)),
        unit.allowed,
    )
    gpus = np.where(stages <= unit.layers, kinds.tp[variant] * dp * stages, np.inf)
    return {int(tp): float(gpus[kinds.tp[variant] == tp].min()) for tp in unit.tps}
