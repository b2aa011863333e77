"""Exact search over microbatch and unit shapes: best first, then branch and bound.

For every slot size S (a divisor of the batch; n = batch / S) a layout is one shape of each unit
with Σ GPUs ≤ N. Slot sizes are processed best first: the one with the least lower bound is next,
first of the LLM alone, then roughly of all units, then with a limit that rises until enough layouts
are found, in small steps at first if very many are within it. Branch and bound within a slot size:
`bounds` leaves only shapes that may be part of a layout within the limit; these are priced exactly
(`options.price`) and joined, so every layout within the limit is found, except those dominated by
at least `top` others (`dominance`): of ties, however many there are, only the simplest remain. Done
when no bound is below the last layout wanted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.planning.bounds import (
    Keep,
    Space,
    divisors,
    llm_floors,
    narrowed,
    rough_floor,
    side_by_side,
    space_of,
)
from disttrain_cli.planning.dominance import Dearness, few_dominators, undominated
from disttrain_cli.planning.objective import combine
from disttrain_cli.planning.options import NEVER, Floats, Ints, Options, join, price, take
from disttrain_cli.planning.units import Cluster, Unit, holder_of, shape_at
from disttrain_cli.spec.shape import ParallelShape

#: Ratio of a slot size's limit to its lower bound, by the number of times it was processed.
GROWTH = (1.01, 1.01, 1.02, 1.03, 1.05, 1.1, 1.2, 1.5, 2.0, 5.0, 25.0, np.inf)
WIDE = 1.2  # times the limit, within which the shapes of a slot size are listed
MANY = 1 << 22  # combinations of shapes; beyond that, those near the bound come first:
NEARER = (1 / 64, 1 / 16, 1 / 4)  # of the way to the limit, by how often there were so many
CHUNK = 1 << 18  # pairs of rows processed together
PRICED = 4096  # options that are priced before the others are compared with them


@dataclass(frozen=True, order=True)
class Candidate:
    """Layout, ordered by time, then GPUs, then simplicity.

    Simpler means fewer stages, less TP, less CP, smaller microbatch.
    """

    total_ms: float
    gpus: int
    stages: int
    tp: int
    cp: int
    microbatch: int
    slot_sequences: int
    units: tuple[ParallelShape, ...]


@dataclass(frozen=True)
class SearchResult:
    """The best layouts, best first, and the number of remaining combinations of unit shapes."""

    best: list[Candidate]
    combinations: int


class Shape(NamedTuple):
    """One unit of a layout, and its times per slot."""

    unit: ParallelShape
    unit_ms: float
    stage_ms: float


def shape_of(options: Options, row: int) -> Shape:
    """Return one of a unit's options as a shape."""
    unit = shape_at(options, row, dp=int(options.dp[row]), pp=int(options.pp[row]))
    return Shape(unit, float(options.unit_ms[row]), float(options.stage_ms[row]))


def candidate_of(shapes: Sequence[Shape], size: int, slots: int, llm: int) -> Candidate:
    """Return the layout of these shapes, in pipeline order, for slots of `size` sequences.

    `llm` is the index of the LLM's unit.
    """
    total_ms = combine(
        [shape.unit_ms for shape in shapes], [shape.stage_ms for shape in shapes], slots, llm
    ).total_ms
    units = [shape.unit for shape in shapes]
    return Candidate(
        float(f"{total_ms:.12g}"),  # independent of the order of summation
        sum(unit.gpus for unit in units),
        sum(unit.pp for unit in units),
        sum(unit.tp for unit in units),
        sum(unit.cp for unit in units),
        size // units[llm].dp,
        size,
        tuple(units),
    )


def search(
    units: list[Unit],
    cluster: Cluster,
    top: int = 1,
    keep: Keep | None = None,
    slots_of: list[int] | None = None,
    shares: list[int] | None = None,
    within_ms: float = np.inf,
) -> SearchResult:
    """Return the `top` fastest layouts under `objective`'s formula, exactly; empty if none fits.

    Args:
        keep: restricts rows, by strategy.
        slots_of: slot sizes to consider (sequences); all divisors of the batch if None.
        shares: most GPUs of each unit; all but one for each other unit if None.
        within_ms: layouts that take longer need not be found.
    """
    sizes = slots_of if slots_of is not None else divisors(cluster.batch)
    most = shares if shares is not None else [cluster.gpus - len(units) + 1] * len(units)
    queue = list(zip(llm_floors(units, sizes, cluster), sizes, strict=True))
    heapq.heapify(queue)
    rough: set[int] = set()
    spaces: dict[int, Space] = {}
    tries, crowded, growth = (
        dict.fromkeys(sizes, 0),
        dict.fromkeys(sizes, 0),
        GROWTH if len(sizes) > 1 else GROWTH[GROWTH.index(1.1) :],
    )
    best: list[Candidate] = []
    while queue:
        bound, size = heapq.heappop(queue)
        cut = min(within_ms, best[-1].total_ms if len(best) == top else np.inf) * (1 + 1e-9)
        if bound > cut or not np.isfinite(bound):
            break
        if size not in rough:
            rough.add(size)
            heapq.heappush(queue, (max(bound, rough_floor(units, size, cluster)), size))
            continue
        limit = min(cut, bound * growth[min(tries[size], len(growth) - 1)])
        tries[size] += 1
        if size not in spaces or spaces[size].within_ms < limit:
            spaces[size] = space_of(units, size, cluster, most, keep, min(cut, WIDE * limit))
        options, floor = narrowed(spaces[size], limit)
        if options is not None and prod(map(len, options)) > MANY and crowded[size] < len(NEARER):
            least = max(floor, bound)
            limit = least + (limit - least) * NEARER[crowded[size]]
            crowded[size] += 1
            options, floor = narrowed(spaces[size], limit)
        if options is not None:
            best = sorted({*best, *_layouts(units, options, size, cluster, limit, top)})[:top]
        heapq.heappush(queue, (max(floor, limit * (1 + 1e-9)), size))
    return SearchResult(best, int(sum(space.combinations for space in spaces.values())))


def _slowest_within(tables: list[Options], gpus: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the least slowest stage of several units that share that many GPUs.

    One shape each, all at least that fast.
    """
    if not tables:
        return np.zeros(len(gpus))
    times = np.unique(np.concatenate([table.stage_ms for table in tables]))
    needed = np.zeros(len(times))
    for table in tables:
        order = np.argsort(table.stage_ms)
        fewest = np.concatenate([[np.inf], np.minimum.accumulate(table.gpus[order].astype(float))])
        needed += fewest[np.searchsorted(table.stage_ms[order], times, side="right")]
    index = np.searchsorted(-needed, -gpus.astype(float), side="left")
    return np.concatenate([times, [np.inf]])[index]


@dataclass(frozen=True)
class _Partial:
    """Rows for the last units of the pipeline, chosen together."""

    gpus: NDArray[np.int64]
    line_ms: NDArray[np.float64]  # units from the LLM's to the end
    parallel_ms: NDArray[np.float64]  # the slowest unit before them, which are parallel
    stage_ms: NDArray[np.float64]
    stages: NDArray[np.int64]  # from the LLM's unit to the end
    pp: NDArray[np.int64]  # of all units together
    tp: NDArray[np.int64]
    cp: NDArray[np.int64]
    rows: NDArray[np.int64]  # [B, units] row indices in each unit's priced table, last unit first

    def __len__(self) -> int:
        return len(self.gpus)


class _Rest(NamedTuple):
    """Minimum GPUs and times of the units that are not yet chosen."""

    gpus: int
    line_ms: float
    parallel_ms: float


def _rest(before: list[Options], llm: int) -> _Rest:
    """Return the minimum figures of the pipeline's first units; unit `llm` holds the LLM."""
    least_ms = [float(other.unit_ms.min()) for other in before]
    return _Rest(
        sum(int(other.gpus.min()) for other in before),
        sum(least_ms[llm:]),
        max(least_ms[:llm], default=0.0),
    )


def _layouts(
    units: list[Unit], wanted: list[Options], size: int, cluster: Cluster, limit: float, top: int
) -> list[Candidate]:
    """Return the `top` best layouts of one slot size within the limit.

    Units are joined last to first.
    """
    slots, llm = cluster.batch // size, holder_of(units)
    within = limit * (1 + 1e-9)
    none = np.zeros(1, np.int64)
    partial = _Partial(
        none,
        np.zeros(1),
        np.zeros(1),
        np.zeros(1),
        none,
        none,
        none,
        none,
        np.zeros((1, 0), np.int64),
    )
    priced: list[Options] = []
    for number in reversed(range(len(units))):
        before, parallel = wanted[:number], number < llm
        rest = _rest(before, llm)
        table = take(
            wanted[number],
            _may_join(wanted[number], partial, rest, parallel, slots, cluster.gpus, within),
        )
        least = _warmup_ms(
            partial.line_ms.min(),
            _warmup_bound_ms(partial, rest).min(),
            table.unit_ms,
            rest,
            parallel,
        )
        most = (within - least) / (slots - 1) if slots > 1 else np.full(len(table), np.inf)
        exact = _priced(units[number], table, size, slots, np.unique(partial.stages), most, top)
        exact = take(exact, _may_join(exact, partial, rest, parallel, slots, cluster.gpus, within))
        priced.append(exact)
        partial = _join(partial, exact, before, llm, slots, cluster.gpus, within, top)
        if not len(partial):
            return []
    layouts = []
    for rows in partial.rows:
        shapes = [shape_of(table, index) for table, index in zip(priced, rows, strict=True)][::-1]
        layouts.append(candidate_of(shapes, size, slots, llm))
    return sorted(layouts)[:top]


def _priced(
    unit: Unit,
    table: Options,
    size: int,
    slots: int,
    afters: NDArray[np.int64],
    most: NDArray[np.float64],
    top: int,
) -> Options:
    """Return priced options (`price`) that may be part of the `top` best layouts."""
    left = np.lexsort((table.cp, table.tp, table.pp, table.gpus))
    exact = take(table, left[:0])
    while True:
        now, left = left[:PRICED], left[PRICED:]
        exact = join([exact, price(unit, take(table, now), size, slots, afters, most[now])])
        exact = take(exact, undominated(*_dearness(exact), top))
        if not len(left):
            return exact
        left = left[few_dominators(_dearness(take(table, left)), _dearness(exact), top)]


def _dearness(options: Options) -> Dearness:
    """Return the comparison columns of options: costs for a layout, and simplicity."""
    return (
        (
            options.gpus,
            options.unit_ms,
            options.stage_ms,
            options.pp,
            options.after_from,
            -options.after_to,
        ),
        # one column for both: CP first
        (options.gpus, options.pp, options.tp, options.cp * NEVER + options.ep),
    )


def _steady_ms(stage_ms: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """Return the time of all slots but the first; zero for one slot, even with infinite stages."""
    return (slots - 1) * stage_ms if slots > 1 else np.zeros_like(stage_ms)


def _warmup_bound_ms(partial: _Partial, rest: _Rest) -> NDArray[np.float64]:
    """Return a lower bound of partial layouts' warm-up with the encoders not yet chosen."""
    return partial.line_ms + np.maximum(partial.parallel_ms, rest.parallel_ms)


def _warmup_ms(
    line_ms: NDArray[np.float64],
    whole_ms: NDArray[np.float64],
    unit_ms: NDArray[np.float64],
    rest: _Rest,
    parallel: bool,
) -> NDArray[np.float64]:
    """Return a lower bound of the warm-up if a unit joins partial layouts with these times."""
    return rest.line_ms + (
        np.maximum(line_ms + unit_ms, whole_ms) if parallel else whole_ms + unit_ms
    )


def _may_join(
    table: Options,
    partial: _Partial,
    rest: _Rest,
    parallel: bool,
    slots: int,
    gpus: int,
    limit: float,
) -> NDArray[np.bool_]:
    """Return a mask of rows that may fit some partial layout within the limit.

    Judged by the best of each of the partial layouts' numbers.
    """
    order = np.argsort(partial.gpus)
    index = np.searchsorted(partial.gpus[order], gpus - rest.gpus - table.gpus, side="right")
    stage_ms, line_ms, whole_ms = (
        np.concatenate([[np.inf], np.minimum.accumulate(values[order])])[index]
        for values in (partial.stage_ms, partial.line_ms, _warmup_bound_ms(partial, rest))
    )
    warmup_ms = _warmup_ms(line_ms, whole_ms, table.unit_ms, rest, parallel)
    return warmup_ms + _steady_ms(np.maximum(table.stage_ms, stage_ms), slots) <= limit


def _join(
    partial: _Partial,
    table: Options,
    before: list[Options],
    llm: int,
    slots: int,
    total_gpus: int,
    limit: float,
    top: int,
) -> _Partial:
    """Return pairs of a partial layout and the preceding unit's shape that may end among the `top`.

    All are within the limit.
    """
    rest, parallel = _rest(before, llm), len(before) < llm
    encoders_ms = _encoders_ms(before, llm, total_gpus)
    joined = replace(
        take(partial, np.zeros(0, np.int64)),
        rows=np.zeros((0, partial.rows.shape[1] + 1), np.int64),
    )
    step = max(1, CHUNK // max(1, len(table)))
    for first in range(0, len(partial), step):
        part = take(partial, np.arange(first, min(first + step, len(partial))))
        gpus = part.gpus[:, None] + table.gpus
        stage_ms = np.maximum(part.stage_ms[:, None], table.stage_ms)
        after = part.stages[:, None]
        warmup_ms = _warmup_ms(
            part.line_ms[:, None],
            _warmup_bound_ms(part, rest)[:, None],
            table.unit_ms,
            rest,
            parallel,
        )
        fits = (
            (gpus + rest.gpus <= total_gpus)
            & (after >= table.after_from)
            & (after < table.after_to)
        )
        fits &= warmup_ms + _steady_ms(stage_ms, slots) <= limit
        a, b = np.nonzero(fits)
        line_ms, parallel_ms, stages = part.line_ms[a], part.parallel_ms[a], part.stages[a]
        if parallel:
            parallel_ms = np.maximum(parallel_ms, table.unit_ms[b])
        else:
            line_ms, stages = line_ms + table.unit_ms[b], stages + table.pp[b]
        pairs = _Partial(
            gpus[a, b],
            line_ms,
            parallel_ms,
            stage_ms[a, b],
            stages,
            part.pp[a] + table.pp[b],
            part.tp[a] + table.tp[b],
            part.cp[a] + table.cp[b],
            np.concatenate([part.rows[a], b[:, None]], axis=1),
        )
        if before:
            left = total_gpus - pairs.gpus
            warmup_ms = pairs.line_ms + np.maximum(pairs.parallel_ms, encoders_ms[left])
            slowest_ms = np.maximum(pairs.stage_ms, _slowest_within(before, left))
            pairs = take(pairs, warmup_ms + rest.line_ms + _steady_ms(slowest_ms, slots) <= limit)
        joined = join([joined, pairs])
        if len(joined) > CHUNK or first + step >= len(partial):
            joined = _best_of(joined, slots, top, bool(before))
    return joined


def _encoders_ms(before: list[Options], llm: int, gpus: int) -> Floats:
    """Return [gpus + 1] the least time of the parallel encoders not yet chosen.

    Indexed by the GPUs of all units not yet chosen.
    """
    tables = [np.full(gpus + 1, np.inf) for _ in before[:llm]]
    for least_ms, other in zip(tables, before, strict=False):
        np.minimum.at(least_ms, other.gpus, other.unit_ms)
    together = [np.minimum.accumulate(least_ms) for least_ms in tables]
    return side_by_side(together) if together else np.zeros(gpus + 1)


def _best_of(joined: _Partial, slots: int, top: int, more: bool) -> _Partial:
    """Return the partial layouts that may be part of the `top` best ones, including ties.

    `more`: units are still to be joined.
    """
    worse: list[Floats | Ints] = [
        joined.gpus,
        joined.line_ms,
        joined.parallel_ms,
        joined.stage_ms,
        joined.stages,
    ]
    if not more:
        total_ms = joined.line_ms + joined.parallel_ms + _steady_ms(joined.stage_ms, slots)
        last = np.partition(total_ms, top - 1)[top - 1] if len(joined) > top else np.inf
        near = np.flatnonzero(total_ms <= last * (1 + 1e-12))
        joined, worse = take(joined, near), [total_ms[near]]
    return take(joined, undominated(worse, (joined.gpus, joined.pp, joined.tp, joined.cp), top))
