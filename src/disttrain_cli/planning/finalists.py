"""Finalists: the best layouts by the formula, ranked by simulated steps over sampled batches.

The formula assumes equal sequences and a step that ends with its last backward; the simulator
covers skewed data, every transfer, the reduction of gradients and the optimizer. Finalists come in
rounds: the formula's best, then its best with at most half as many ranks with the same weights of
the LLM as the last round's best has, and so on, because many replicas of few stages have the most
to reduce. From each list those are selected that are fastest by the formula plus reductions and
optimizer (`climb.estimate_s`), as a unit without the LLM may have much to reduce, too. Rounds end
once the formula alone takes longer than the best simulated time, and longer than it predicts for
the layout that was fastest. Every grouping of modules into units has its own rounds, the fastest by
the formula first, after the layouts of other strategies. Then come, for the best one's grouping,
the formula's best on slightly fewer devices, as the best for fewer is a layout for more, and last
other shapes of the LLM near the best one's.

All finalists run the same global batches: one each first, and the best few of them all
`predict.batches`. Every rank has a device of its own, even if a CPU stands in for a cluster: shared
cores would level all layouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from disttrain_cli.costs.layout import optimizer_s, stages_of
from disttrain_cli.costs.memory import fits
from disttrain_cli.planning.climb import estimate_s
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.objective import layout_time
from disttrain_cli.planning.predict import batches, simulated_s
from disttrain_cli.planning.search import Candidate, SearchResult
from disttrain_cli.planning.split_backward import timed, whole
from disttrain_cli.planning.units import Cluster, Unit, holder_of, units_of
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile

ROUNDS = 6
EACH = 3  # finalists of a round
# share of the devices that some finalists leave unused: a plan for more devices is then no slower
FEWER = (1 / 48, 1 / 16)
AHEAD = 1.03  # highest accepted ratio to the best finalist's time by the formula
SURE = 4  # fewest finalists simulated with all batches
CLOSE = 1.02  # ratio to the best time over one batch up to which a finalist may turn out best
CP_GAIN = 5e-3  # of a step, that CP must gain: exchanges are not priced more precisely

T = TypeVar("T")
#: Modules of every unit, and those of them replicated over its TP group.
Grouping = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


@dataclass(frozen=True)
class Ranked:
    """Finalist with its simulated time, every rank on a device of its own."""

    layout: Layout
    iteration_s: float


@dataclass(frozen=True)
class Limits:
    """Restrictions of a round's layouts."""

    within_ms: float  # by the formula
    most: int | None = None  # largest dp_cp_size of the LLM's unit (ranks with the same weights)
    least: int = 1
    without: frozenset[tuple[int, int, int]] = frozenset()  # (TP, CP, DP) of the LLM's unit
    fewer: int = 0  # devices to leave unused

    @property
    def any_llm(self) -> bool:
        """True if the LLM's unit may have any shape."""
        return self.most is None and self.least == 1 and not self.without


def rounds(
    profile: Profile,
    cluster: Cluster,
    draws: Draws,
    groups: list[list[Unit]],
    find: Callable[[list[Unit], Limits, int], SearchResult],
    layout_of: Callable[[list[Unit], Candidate], Layout],
    wanted: int,
    pool: int,
    near: int,
    others: Sequence[Layout] = (),
) -> list[Ranked]:
    """Return finalists with their times over one global batch.

    Args:
        groups: units that layouts may have (`units.groupings`).
        find: returns that many of the formula's best layouts of some units within limits.
        wanted: finalists of the first round, `EACH` at least.
        pool: number of the formula's best from which a round's different ones are selected.
        near: finalists after the last round with another TP or CP or other replicas, up to twice or
            half as many ranks with the same weights, than those before.
        others: finalists whatever their time by the formula, with unsplit backwards.
    """
    finalists: list[Ranked] = []
    formula_ms: list[float] = []

    def best() -> Ranked:
        return min(finalists, key=lambda one: one.iteration_s)

    def within_ms() -> float:
        """Return the time by the formula beyond which a finalist is not considered.

        The formula takes longer than the simulator if backwards are split and messages overlapped.
        """
        if not finalists:
            return math.inf
        pairs = zip(finalists, formula_ms, strict=True)
        fastest, its_ms = min(pairs, key=lambda pair: pair[0].iteration_s)
        return max(1e3 * fastest.iteration_s, AHEAD * its_ms)

    def fastest_ms(units: list[Unit]) -> float:
        best = find(units, Limits(math.inf), 1).best
        return best[0].total_ms if best else math.inf

    def add(units: list[Unit], limits: Limits, count: int, pool: int) -> int:
        """Add finalists within limits; return the LLM's dp_cp_size in the formula's best.

        Returns 0 if that layout is too slow.
        """
        result = find(units, limits, pool)
        if not result.best or result.best[0].total_ms >= limits.within_ms:
            return 0
        holder = holder_of(units)
        kinds = {
            candidate: (
                candidate.slot_sequences,
                replace(candidate.units[holder], recompute=False, cp_comm_type="a2a", ep=1),
            )
            for candidate in result.best
        }
        layouts = {candidate: layout_of(units, candidate) for candidate in result.best}
        ordered = sorted(
            result.best, key=lambda candidate: estimate_s(cluster, units, layouts[candidate])
        )
        for candidate in diverse(ordered, kinds.__getitem__, count):
            layout = layouts[candidate]
            if layout in others:
                continue
            finalists.append(Ranked(*timed(profile, cluster, layout, draws=draws)))
            formula_ms.append(candidate.total_ms)
        return result.best[0].units[holder].dp_cp_size

    for layout in others:
        if layout in (whole(one.layout) for one in finalists):
            continue
        finalists.append(Ranked(*timed(profile, cluster, layout, draws=draws)))
        formula_ms.append(layout_time(units_of(profile, cluster, layout), layout).total_ms)
    for units in sorted(groups, key=fastest_ms) if len(groups) > 1 else groups:
        most: int | None = None
        for number in range(ROUNDS):
            count = EACH if number else max(SURE, wanted)
            holders = add(units, Limits(within_ms(), most), count, pool)
            most = holders // 2
            if not most:
                break
    if not finalists:
        return []
    same = [one for one in groups if grouping(one) == grouping(best().layout.units)]
    if not same:
        return finalists
    units = same[0]
    for share in FEWER:
        if fewer := int(cluster.gpus * share):
            add(units, Limits(within_ms(), fewer=fewer), EACH, pool)
    for _ in range(near):
        holders = best().layout.unit_of(profile.inputs.llm).dp_cp_size
        alike = [one.layout for one in finalists if grouping(one.layout.units) == grouping(units)]
        llms = [layout.unit_of(profile.inputs.llm) for layout in alike]
        limits = Limits(
            within_ms(),
            2 * holders,
            -(-holders // 2),
            frozenset((llm.tp, llm.cp, llm.dp) for llm in llms),
        )
        if not add(units, limits, 1, 1):
            break
    return finalists


def grouping(units: Iterable[Unit | UnitPlan]) -> Grouping:
    """Return the grouping of some units."""
    return tuple((tuple(unit.modules), unit.replicated) for unit in units)


def one_batch_s(
    profile: Profile, layout: Layout, cluster: Cluster, draws: Draws | None = None
) -> float:
    """Return the time of the step over the first global batch."""
    return simulated_s(profile, layout, cluster, range(1), shared=False, draws=draws)


def diverse(items: Sequence[T], kind: Callable[[T], Hashable], count: int) -> list[T]:
    """Return at most `count` items, best first, preferring kinds that occur less often so far."""
    seen: Counter[Hashable] = Counter()
    order: list[tuple[int, int]] = []
    for index, item in enumerate(items):
        order.append((seen[kind(item)], index))
        seen[kind(item)] += 1
    return [items[index] for index in sorted(index for _, index in sorted(order)[:count])]


def rank(
    profile: Profile,
    cluster: Cluster,
    draws: Draws,
    finalists: list[Ranked],
    wanted: int = SURE,
) -> list[Ranked]:
    """Return the best `wanted` finalists by their times over all batches (`SURE` at least).

    The chosen one comes first (`chosen_first`), then the fastest. If backwards may be split, the
    delays of potential winners are first searched for thoroughly. Finalists with other slots or
    another shape of the LLM's unit come before more of the same; equal times are decided by the
    simpler layout.

    Args:
        finalists: with their times over one global batch.
    """

    def kind(one: Ranked) -> Hashable:
        llm = one.layout.unit_of(profile.inputs.llm)
        shape = llm.tp, llm.cp, llm.dp, llm.pp, shares(one.layout)
        return grouping([llm]), one.layout.microbatches, shape

    ordered = sorted(finalists, key=rank_key)
    best = diverse(ordered, kind, max(wanted, SURE))
    if all(shares(one.layout) for one in best):
        best += [one for one in ordered if not shares(one.layout)][:1]
    numbers = batches(cluster)

    def again(one: Ranked) -> Ranked:
        thorough = len(numbers) > 1 and one.iteration_s <= CLOSE * best[0].iteration_s
        return Ranked(*timed(profile, cluster, whole(one.layout), numbers, draws, thorough))

    return chosen_first(sorted(map(again, best), key=rank_key), cluster.gpus_per_node)


def chosen_first(ranked: Sequence[Ranked], gpus_per_node: int) -> list[Ranked]:
    """Return layouts, given best first, with the chosen one moved to the front.

    The choice is the best, or the best without CP or with CP groups inside nodes only if that is
    hardly slower (`CP_GAIN`).
    """
    for width in (1, gpus_per_node):
        for one in ranked:
            simple = all(unit.cp == 1 or unit.tp_cp_size <= width for unit in one.layout.units)
            if simple and one.iteration_s * (1 - CP_GAIN) <= ranked[0].iteration_s:
                return [one, *(other for other in ranked if other is not one)]
    return list(ranked)


def shares(layout: Layout) -> bool:
    """Return True if ranks share tokens (CP) in any unit."""
    return any(unit.cp > 1 for unit in layout.units)


def rank_key(one: Ranked) -> tuple[object, ...]:
    """Return the sort key: time to nine digits, then simplicity.

    Simpler means fewer GPUs, fewer stages, less TP, less CP, smaller microbatches.
    """
    units = one.layout.units
    return (
        float(f"{one.iteration_s:.9g}"),
        one.layout.gpus_used,
        sum(unit.pp for unit in units),
        sum(unit.tp for unit in units),
        sum(unit.cp for unit in units),
        one.layout.microbatch_size,
        one.layout.describe(),
    )


def faster_zero(profile: Profile, cluster: Cluster, layout: Layout) -> Layout:
    """Return the layout with the faster of the ZeRO stages that fit; ties keep its own stage.

    Only the optimizer's part of a step depends on it. Training in bf16 needs ZeRO-1.
    """
    other = layout.model_copy(update={"zero_stage": 1 - layout.zero_stage})
    if profile.precision == "bf16" or not fits(profile, other, cluster.memory_gib):
        return layout
    mine, theirs = (
        max(
            optimizer_s(profile, choice, stage, cluster.gpus_per_node)
            for stage in stages_of(profile, choice)
        )
        for choice in (layout, other)
    )
    return other if theirs < mine else layout
