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
from disttrain_cli.planning.units import Cluster, Unit, holder_of

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


def candidate_of(shapes: Sequence[Shape], size: int, slots: int, llm: int) -> Candidate:
    """The layout of these shapes, in pipeline order, for slots of `size` sequences; the unit `llm` holds the LLM."""
    total_ms = combine([shape.unit_ms for shape in shapes], [shape.stage_ms for shape in shapes], slots, llm).total_ms
    return Candidate(
        float(f"{total_ms:.12g}"),  # sums in another order are the same time
        sum(shape.tp * shape.dp * shape.pp for shape in shapes), sum(shape.pp for shape in shapes),
        sum(shape.tp for shape in shapes), size // shapes[llm].dp, size, tuple((s.tp, s.dp, s.pp) for s in shapes),
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
    line_ms: NDArray[np.float64]  # units from the LLM's to the end
    beside_ms: NDArray[np.float64]  # the slowest unit before them: they stand side by side
    stage_ms: NDArray[np.float64]
    stages: NDArray[np.int64]  # from the LLM's unit to the end
    rows: tuple[NDArray[np.int64], ...]  # row numbers in each unit's priced table, last unit first


class _Rest(NamedTuple):
    """The units that are not yet chosen, as far as the best of each of their numbers tells."""

    gpus: int
    line_ms: float
    beside_ms: float


def _rest(before: list[Options], llm: int) -> _Rest:
    """Of the first units of the pipeline; unit `llm` holds the LLM."""
    least_ms = [float(other.unit_ms.min()) for other in before]
    return _Rest(sum(int(other.gpus.min()) for other in before), sum(least_ms[llm:]), max(least_ms[:llm], default=0.0))


def _layouts(units: list[Unit], wanted: list[Options], size: int, cluster: Cluster, limit: float,
             top: int) -> list[Candidate]:
    """Every layout of one slot size within the limit, the `top` best of them. Units are joined last to first."""
    slots, llm = cluster.batch // size, holder_of(units)
    within = limit * (1 + 1e-9)
    partial = _Partial(np.zeros(1, np.int64), np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1, np.int64), ())
    priced: list[Options] = []
    for number in reversed(range(len(units))):
        before, beside = wanted[:number], number < llm
        rest = _rest(before, llm)
        table = take(wanted[number], _may_join(wanted[number], partial, rest, beside, slots, cluster.gpus, within))
        least = _warmup_ms(partial.line_ms.min(), _whole_ms(partial, rest).min(), table.unit_ms, rest, beside)
        most = (within - least) / (slots - 1) if slots > 1 else np.full(len(table), np.inf)
        exact = price(units[number], table, size, slots, np.unique(partial.stages), most)
        exact = take(exact, _may_join(exact, partial, rest, beside, slots, cluster.gpus, within))
        priced.append(exact)
        partial = _join(partial, exact, before, llm, slots, cluster.gpus, within)
        if not len(partial.gpus):
            return []
    total = partial.line_ms + partial.beside_ms + _steady_ms(partial.stage_ms, slots)
    nearest = np.argsort(total, kind="stable")
    if len(nearest) > top:  # ties with the last one wanted stay in
        nearest = nearest[total[nearest] <= total[nearest[top - 1]] * (1 + 1e-12)]
    found = []
    for row in nearest:
        shapes = [Shape(int(t.tp[i]), int(t.dp[i]), int(t.pp[i]), bool(t.checkpointing[i]), float(t.unit_ms[i]),
                        float(t.stage_ms[i]))
                  for t, i in zip(priced, (index[row] for index in partial.rows), strict=True)][::-1]
        found.append(candidate_of(shapes, size, slots, llm))
    return found


def _steady_ms(stage_ms: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """Time of all slots but the first; none for one slot, however slow (even infinite) its stages."""
    return (slots - 1) * stage_ms if slots > 1 else np.zeros_like(stage_ms)


def _whole_ms(partial: _Partial, rest: _Rest) -> NDArray[np.float64]:
    """Warm-up of partial layouts with the encoders that are not yet chosen, at least."""
    return partial.line_ms + np.maximum(partial.beside_ms, rest.beside_ms)


def _warmup_ms(line_ms: NDArray[np.float64], whole_ms: NDArray[np.float64], unit_ms: NDArray[np.float64], rest: _Rest,
               beside: bool) -> NDArray[np.float64]:
    """Lower bound of the warm-up where a unit joins partial layouts of at least these times."""
    return rest.line_ms + (np.maximum(line_ms + unit_ms, whole_ms) if beside else whole_ms + unit_ms)


def _may_join(table: Options, partial: _Partial, rest: _Rest, beside: bool, slots: int, gpus: int,
              limit: float) -> NDArray[np.bool_]:
    """Which rows fit some partial layout within the limit, as far as the best of each of its numbers tells."""
    order = np.argsort(partial.gpus)
    place = np.searchsorted(partial.gpus[order], gpus - rest.gpus - table.gpus, side="right")
    stage_ms, line_ms, whole_ms = (np.concatenate([[np.inf], np.minimum.accumulate(values[order])])[place]
                                   for values in (partial.stage_ms, partial.line_ms, _whole_ms(partial, rest)))
    warmup_ms = _warmup_ms(line_ms, whole_ms, table.unit_ms, rest, beside)
    return warmup_ms + _steady_ms(np.maximum(table.stage_ms, stage_ms), slots) <= limit


def _join(partial: _Partial, table: Options, before: list[Options], llm: int, slots: int, total_gpus: int,
          limit: float) -> _Partial:
    """All pairs of a partial layout and a shape of the unit before it that may end within the limit."""
    rest, beside = _rest(before, llm), len(before) < llm
    parts: list[_Partial] = []
    step = max(1, CHUNK // max(1, len(table)))
    for first in range(0, len(partial.gpus), step):
        part = slice(first, first + step)
        gpus = partial.gpus[part, None] + table.gpus
        stage_ms = np.maximum(partial.stage_ms[part, None], table.stage_ms)
        after = partial.stages[part, None]
        warmup_ms = _warmup_ms(partial.line_ms[part, None], _whole_ms(partial, rest)[part, None], table.unit_ms, rest,
                               beside)
        fits = (gpus + rest.gpus <= total_gpus) & (after >= table.after_from) & (after < table.after_to)
        fits &= warmup_ms + _steady_ms(stage_ms, slots) <= limit
        a, b = np.nonzero(fits)
        line_ms, beside_ms, stages = partial.line_ms[part][a], partial.beside_ms[part][a], partial.stages[part][a]
        if beside:
            beside_ms = np.maximum(beside_ms, table.unit_ms[b])
        else:
            line_ms, stages = line_ms + table.unit_ms[b], stages + table.pp[b]
        parts.append(_Partial(gpus[a, b], line_ms, beside_ms, stage_ms[a, b], stages,
                              (*(rows[part][a] for rows in partial.rows), b)))
    numbers = zip(*((p.gpus, p.line_ms, p.beside_ms, p.stage_ms, p.stages) for p in parts), strict=True)
    gpus_, line_, beside_, stage_, stages_ = (np.concatenate(column) for column in numbers)
    rows_ = tuple(np.concatenate(rows) for rows in zip(*(p.rows for p in parts), strict=True))
    joined = _Partial(gpus_, line_, beside_, stage_, stages_, rows_)
    if not before or not len(joined.gpus):
        return joined
    slowest = np.maximum(joined.stage_ms, _slowest_within(before, total_gpus - joined.gpus))
    kept = _whole_ms(joined, rest) + rest.line_ms + _steady_ms(slowest, slots) <= limit
    return _Partial(joined.gpus[kept], joined.line_ms[kept], joined.beside_ms[kept], joined.stage_ms[kept],
                    joined.stages[kept], tuple(rows[kept] for rows in joined.rows))
