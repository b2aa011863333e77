"""Exact search over microbatch and the shape of every unit: best first over slot sizes, branch and bound in each.

For every slot size S (a divisor of the batch; n = batch / S) a layout is one shape of each unit with Σ GPUs ≤ N.
The slot size with the least lower bound is looked at next: once roughly, then with a limit that rises until enough
layouts are found. Within a limit `bounds` leaves only shapes that may be part of a layout; these are priced exactly
(`options.price`) and joined, so *every* layout within the limit is found. Done when no bound is below the last
layout wanted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.planning.bounds import Keep, Space, divisors, narrowed, rough_floor, space_of
from disttrain_cli.planning.objective import combine
from disttrain_cli.planning.options import Options, price, take
from disttrain_cli.planning.units import Cluster, Unit

#: Of the limit of a slot size over its lower bound, by how often it was looked at.
GROWTH = (1.01, 1.01, 1.02, 1.03, 1.05, 1.1, 1.2, 1.5, 2.0, 5.0, 25.0, np.inf)
CHUNK = 1 << 20


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
    checkpointing: tuple[bool, ...]  # of every unit


@dataclass(frozen=True)
class Found:
    """The best layouts, best first, and how many combinations of unit shapes they were the best of."""

    best: list[Candidate]
    combinations: int


class Shape(NamedTuple):
    """One unit of a layout, and its times per slot."""

    tp: int
    dp: int
    pp: int
    checkpointing: bool
    unit_ms: float
    stage_ms: float


def candidate_of(shapes: Sequence[Shape], size: int, slots: int, llm_dp: int) -> Candidate:
    """The layout of these shapes, in pipeline order, for slots of `size` sequences."""
    total_ms = combine([shape.unit_ms for shape in shapes], [shape.stage_ms for shape in shapes], slots).total_ms
    return Candidate(
        float(f"{total_ms:.12g}"),  # sums in another order are the same time
        sum(shape.tp * shape.dp * shape.pp for shape in shapes), sum(shape.pp for shape in shapes),
        sum(shape.tp for shape in shapes), size // llm_dp, size, tuple((s.tp, s.dp, s.pp) for s in shapes),
        tuple(shape.checkpointing for shape in shapes))


def search(units: list[Unit], cluster: Cluster, top: int = 1, keep: Keep | None = None,
           slots_of: list[int] | None = None, shares: list[int] | None = None, within_ms: float = np.inf) -> Found:
    """The `top` fastest layouts under the formula of `objective`, exact; none where nothing fits.

    Args:
        keep: restricts the rows of a strategy.
        slots_of: slot sizes to consider (sequences); all divisors of the batch if None.
        shares: most GPUs of each unit; all but one for each other unit if None.
        within_ms: layouts that take longer need not be found.
    """
    sizes = slots_of if slots_of is not None else divisors(cluster.batch)
    most = shares if shares is not None else [cluster.gpus - len(units) + 1] * len(units)
    queue = [(rough_floor(units, size, cluster), size) for size in sizes]
    heapq.heapify(queue)
    spaces: dict[int, Space] = {}
    tries, growth = dict.fromkeys(sizes, 0), GROWTH if len(sizes) > 1 else GROWTH[GROWTH.index(1.1):]
    best: list[Candidate] = []
    while queue:
        bound, size = heapq.heappop(queue)
        cut = min(within_ms, best[-1].total_ms if len(best) == top else np.inf) * (1 + 1e-9)
        if bound > cut or not np.isfinite(bound):
            break
        if size not in spaces:
            spaces[size] = space_of(units, size, cluster, most, keep)
            heapq.heappush(queue, (max(bound, spaces[size].floor_ms), size))
            continue
        limit = min(cut, bound * growth[min(tries[size], len(growth) - 1)])
        tries[size] += 1
        options, floor = narrowed(spaces[size], limit)
        if options is not None:
            best = sorted({*best, *_layouts(units, options, size, cluster, limit, top)})[:top]
        heapq.heappush(queue, (max(floor, limit * (1 + 1e-9)), size))
    return Found(best, int(sum(space.combinations for space in spaces.values())))


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


def _layouts(units: list[Unit], wanted: list[Options], size: int, cluster: Cluster, limit: float,
             top: int) -> list[Candidate]:
    """Every layout of one slot size within the limit, the `top` best of them. Units are joined last to first."""
    slots = cluster.batch // size
    within = limit * (1 + 1e-9)
    partial = _Partial(np.zeros(1, np.int64), np.zeros(1), np.zeros(1), np.zeros(1, np.int64), ())
    priced: list[Options] = []
    for number in reversed(range(len(units))):
        before = wanted[:number]
        table = take(wanted[number], _may_join(wanted[number], partial, before, slots, cluster.gpus, within))
        rest = sum(float(other.unit_ms.min()) for other in before) + float(partial.unit_ms.min())
        most = (within - rest - table.unit_ms) / (slots - 1) if slots > 1 else np.full(len(table), np.inf)
        exact = price(units[number], table, size, slots, np.unique(partial.stages), most)
        exact = take(exact, _may_join(exact, partial, before, slots, cluster.gpus, within))
        priced.append(exact)
        partial = _join(partial, exact, before, slots, cluster.gpus, within)
        if not len(partial.gpus):
            return []
    total = partial.unit_ms + _steady_ms(partial.stage_ms, slots)
    nearest = np.argsort(total, kind="stable")
    if len(nearest) > top:  # ties with the last one wanted stay in
        nearest = nearest[total[nearest] <= total[nearest[top - 1]] * (1 + 1e-12)]
    found = []
    holder = next(number for number, unit in enumerate(units) if unit.holds_llm)
    for row in nearest:
        shapes = [Shape(int(t.tp[i]), int(t.dp[i]), int(t.pp[i]), bool(t.checkpointing[i]), float(t.unit_ms[i]),
                        float(t.stage_ms[i]))
                  for t, i in zip(priced, (index[row] for index in partial.rows), strict=True)][::-1]
        found.append(candidate_of(shapes, size, slots, shapes[holder].dp))
    return found


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
