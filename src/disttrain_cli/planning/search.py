"""Exact search over microbatch and the shape of every unit: branch and bound over columns of options.

For every slot size S (a divisor of the batch; n = batch / S) each unit has a table of shapes; a layout is one
row of each with Σ GPUs ≤ N. A pass keeps everything whose lower bound is within a limit, so it finds *every*
layout with a time within it; passes raise the limit until enough are found. Bounds on the units not chosen yet:
together they take at least the sum of their shortest times once, and with G GPUs left their slowest stage takes
at least the least τ for which shapes of all of them that are as fast as τ need no more than G.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.planning.objective import busiest_load
from disttrain_cli.planning.options import Options, list_options, price
from disttrain_cli.planning.units import Cluster, Unit

GROWTH = (1.002, 1.005, 1.01, 1.02, 1.04, 1.08, 1.16, 1.3, 1.6, 2.5, 5.0, 20.0, np.inf)
CHUNK = 1 << 20

#: Which options a strategy allows: (unit number, slot, options) → rows kept.
Keep = Callable[[int, int, Options], NDArray[np.bool_]]


@dataclass(frozen=True, order=True)
class Candidate:
    """A layout, ordered by time, then GPUs, then simplicity (fewer stages, less TP, smaller microbatch)."""

    total_ms: float
    gpus: int
    stages: int
    tp: int
    microbatch: int
    slot_sequences: int
    shapes: tuple[tuple[int, int, int], ...]  # (tp, dp, pp) of every unit


@dataclass(frozen=True)
class Found:
    """The best layouts, best first, and how many combinations of unit shapes they were the best of."""

    best: list[Candidate]
    combinations: int


@cache
def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def search(units: list[Unit], cluster: Cluster, top: int = 1, keep: Keep | None = None,
           slots_of: list[int] | None = None) -> Found:
    """The `top` fastest layouts under the formula of `objective`, exact; none where nothing fits.

    Args:
        keep: restricts the options of a strategy.
        slots_of: slot sizes to consider (sequences); all divisors of the batch if None.
    """
    sizes = slots_of if slots_of is not None else divisors(cluster.batch)
    floors = {size: _floor(units, size, cluster) for size in sizes}
    tables: dict[int, _Tables] = {}
    best: list[Candidate] = []
    for growth in GROWTH:
        limit = _least(floors, tables, units, cluster, keep) * growth
        best = []
        for size in sorted(sizes, key=lambda size: floors[size]):
            if floors[size] > limit:
                continue
            if size not in tables:
                tables[size] = _tables(units, size, cluster, keep)
                floors[size] = max(floors[size], tables[size].floor_ms)
            if floors[size] <= limit and np.isfinite(floors[size]):
                best = sorted(best + _layouts(units, tables[size], size, cluster, limit, top))[:top]
                if len(best) == top:
                    limit = min(limit, best[-1].total_ms * (1 + 1e-9))
        if len(best) == top:
            break
    return Found(best, sum(int(np.prod([float(len(o)) for o in table.options])) for table in tables.values()))


def _floor(units: list[Unit], size: int, cluster: Cluster) -> float:
    """Lower bound of a step's time for a slot size, without listing options."""
    unit_ms, work_ms = 0.0, 0.0
    for unit in units:
        whole, work = np.inf, np.inf
        for tp in unit.tps:
            base, slope = unit.layer_ms(tp)
            most = float(max(1, cluster.gpus // tp))
            dp = float(max(d for d in divisors(size) if d <= most)) if unit.holds_llm else most
            load = busiest_load(unit.holds_llm, size, unit.items_per_sequence, np.array([dp]))[0]
            whole = min(whole, base.sum() + slope.sum() * load)
            work = min(work, tp * (min(base.sum(), base.sum() * dp) + slope.sum() * size))
        unit_ms, work_ms = unit_ms + max(0.0, whole), work_ms + max(0.0, work)
    return (unit_ms + (cluster.batch // size - 1) * work_ms / cluster.gpus) * (1 - 1e-9)


def _least(floors: dict[int, float], tables: dict[int, _Tables], units: list[Unit], cluster: Cluster,
           keep: Keep | None) -> float:
    """The smallest lower bound of all slot sizes, sharpened by listing the options of those that seem best."""
    while True:
        size = min(floors, key=lambda size: floors[size])
        if size in tables:
            return floors[size]
        tables[size] = _tables(units, size, cluster, keep)
        floors[size] = max(floors[size], tables[size].floor_ms)


@dataclass(frozen=True)
class _Tables:
    """Options of every unit for one slot size, with bounds on what the other units take."""

    options: list[Options]
    rest_unit_ms: list[float]  # per unit: least time of all others together
    rest_stage_ms: list[NDArray[np.float64]]  # per unit and option: least slowest stage of the others
    floor_ms: float  # of a whole step; infinite where a unit has no option


def _tables(units: list[Unit], size: int, cluster: Cluster, keep: Keep | None) -> _Tables:
    """Options of every unit, leaving at least one GPU to each of the others, and their bounds."""
    options = [list_options(unit, size, cluster.gpus - len(units) + 1) for unit in units]
    if keep is not None:
        options = [table.take(keep(number, size, table)) for number, table in enumerate(options)]
    if not all(len(table) for table in options):
        return _Tables(options, [], [], np.inf)
    least = [float(table.unit_ms.min()) for table in options]
    rest_stage_ms = [_slowest_within(options[:number] + options[number + 1:], cluster.gpus - table.gpus)
                     for number, table in enumerate(options)]
    slowest = float(_slowest_within(options, np.array([cluster.gpus]))[0])
    floor = sum(least) + (cluster.batch // size - 1) * slowest if np.isfinite(slowest) else np.inf
    return _Tables(options, [sum(least) - own for own in least], rest_stage_ms, floor * (1 - 1e-9))


def _slowest_within(tables: list[Options], gpus: NDArray[np.int64]) -> NDArray[np.float64]:
    """Least slowest stage of several units on so many GPUs together: one shape each, all at least that fast."""
    if not tables:
        return np.zeros(len(gpus))
    times = np.unique(np.concatenate([table.stage_ms for table in tables]))
    needed = np.zeros(len(times))
    for table in tables:
        order = np.argsort(table.stage_ms)
        fewest = np.concatenate([[np.inf], np.minimum.accumulate(table.gpus[order].astype(float))])
        needed += fewest[np.searchsorted(table.stage_ms[order], times, side="right")]
    place = np.searchsorted(-needed, -gpus.astype(float), side="left")
    return np.concatenate([times, [np.inf]])[place]


@dataclass(frozen=True)
class _Partial:
    """Rows for the last units of the pipeline, chosen together."""

    gpus: NDArray[np.int64]
    unit_ms: NDArray[np.float64]
    stage_ms: NDArray[np.float64]
    stages: NDArray[np.int64]
    rows: tuple[NDArray[np.int64], ...]  # row numbers in each unit's priced table, last unit first


def _layouts(units: list[Unit], tables: _Tables, size: int, cluster: Cluster, limit: float,
             top: int) -> list[Candidate]:
    """Every layout of one slot size within the limit, the `top` best of them. Units are joined last to first."""
    slots = cluster.batch // size
    within = limit * (1 + 1e-9)
    wanted: list[Options] = []
    for table, rest_ms, rest_stage_ms in zip(tables.options, tables.rest_unit_ms, tables.rest_stage_ms, strict=True):
        slowest = np.maximum(table.stage_ms, rest_stage_ms)
        least = table.unit_ms + rest_ms + _steady_ms(slowest, slots)
        wanted.append(table.take((least <= within) & np.isfinite(slowest)))
    if not all(len(table) for table in wanted):
        return []
    partial = _Partial(np.zeros(1, np.int64), np.zeros(1), np.zeros(1), np.zeros(1, np.int64), ())
    priced: list[Options] = []
    for number in reversed(range(len(units))):
        before = wanted[:number]
        table = wanted[number].take(_may_join(wanted[number], partial, before, slots, cluster.gpus, within))
        exact = price(units[number], table, size, slots, np.unique(partial.stages))
        exact = exact.take(_may_join(exact, partial, before, slots, cluster.gpus, within))
        priced.append(exact)
        partial = _join(partial, exact, before, slots, cluster.gpus, within)
        if not len(partial.gpus):
            return []
    total = partial.unit_ms + _steady_ms(partial.stage_ms, slots)
    nearest = np.argsort(total, kind="stable")
    if len(nearest) > top:  # ties with the last one wanted stay in
        nearest = nearest[total[nearest] <= total[nearest[top - 1]] * (1 + 1e-12)]
    found = []
    for row in nearest:
        shapes = [tuple(int(v[index[row]]) for v in (t.tp, t.dp, t.pp))
                  for t, index in zip(priced, partial.rows, strict=True)][::-1]
        holder = next(i for i, unit in enumerate(units) if unit.holds_llm)
        found.append(Candidate(_rounded(float(total[row])), int(partial.gpus[row]), sum(s[2] for s in shapes),
                               sum(s[0] for s in shapes), size // shapes[holder][1], size,
                               tuple(shapes)))  # type: ignore[arg-type]
    return found


def _rounded(value: float) -> float:
    """Twelve digits: sums in another order are the same time."""
    return float(f"{value:.12g}")


def _steady_ms(stage_ms: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """Time of all slots but the first; none for one slot, however slow (even infinite) its stages."""
    return (slots - 1) * stage_ms if slots > 1 else np.zeros_like(stage_ms)


def _may_join(table: Options, partial: _Partial, before: list[Options], slots: int, gpus: int,
              limit: float) -> NDArray[np.bool_]:
    """Which rows fit some partial layout within the limit, as far as the best of each of its numbers tells."""
    order = np.argsort(partial.gpus)
    left = gpus - sum(int(other.gpus.min()) for other in before) - table.gpus
    place = np.searchsorted(partial.gpus[order], left, side="right")
    stage_ms, unit_ms = (np.concatenate([[np.inf], np.minimum.accumulate(values[order])])[place]
                         for values in (partial.stage_ms, partial.unit_ms))
    rest = sum(float(other.unit_ms.min()) for other in before)
    return table.unit_ms + unit_ms + rest + _steady_ms(np.maximum(table.stage_ms, stage_ms), slots) <= limit


def _join(partial: _Partial, table: Options, before: list[Options], slots: int, total_gpus: int,
          limit: float) -> _Partial:
    """All pairs of a partial layout and a shape of the unit before it that may end within the limit."""
    rest = sum(float(other.unit_ms.min()) for other in before)
    rest_gpus = sum(int(other.gpus.min()) for other in before)
    parts: list[_Partial] = []
    step = max(1, CHUNK // max(1, len(table)))
    for first in range(0, len(partial.gpus), step):
        part = slice(first, first + step)
        gpus = partial.gpus[part, None] + table.gpus
        unit_ms = partial.unit_ms[part, None] + table.unit_ms
        stage_ms = np.maximum(partial.stage_ms[part, None], table.stage_ms)
        after = partial.stages[part, None]
        fits = (gpus + rest_gpus <= total_gpus) & (after >= table.after_from) & (after < table.after_to)
        fits &= unit_ms + rest + _steady_ms(stage_ms, slots) <= limit
        a, b = np.nonzero(fits)
        parts.append(_Partial(gpus[a, b], unit_ms[a, b], stage_ms[a, b], partial.stages[part][a] + table.pp[b],
                              (*(rows[part][a] for rows in partial.rows), b)))
    gpus_, unit_, stage_, stages_, rows_ = zip(*((p.gpus, p.unit_ms, p.stage_ms, p.stages, p.rows) for p in parts),
                                               strict=True)
    joined = _Partial(np.concatenate(gpus_), np.concatenate(unit_), np.concatenate(stage_), np.concatenate(stages_),
                      tuple(np.concatenate(rows) for rows in zip(*rows_, strict=True)))
    if not before or not len(joined.gpus):
        return joined
    slowest = np.maximum(joined.stage_ms, _slowest_within(before, total_gpus - joined.gpus))
    kept = joined.unit_ms + rest + _steady_ms(slowest, slots) <= limit
    return _Partial(joined.gpus[kept], joined.unit_ms[kept], joined.stage_ms[kept], joined.stages[kept],
                    tuple(rows[kept] for rows in joined.rows))
