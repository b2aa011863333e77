"""Which shapes may still be part of a layout within a time limit, for one slot size.

With n slots a step takes Σ unit times + (n - 1) · τ, where of the encoders, which stand side by
side, only the slowest counts and τ is the slowest stage. τ is cut into intervals. In one of them
the fewest stages that make a row of a unit (`options.Rows`) fast enough are known in closed form,
hence its GPUs, hence the least time of the unit by number of GPUs, as a plain array. The LLM has
few options, so for each of them and each interval the arrays of the other units against each other
give a bound on the whole step. The intervals that survive are cut finer; in the end a row survives
only where it fits beside some surviving option of the LLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.planning.options import (
    NEVER,
    SAFE,
    Options,
    Rows,
    fitting,
    list_rows,
    options_of,
    slowest_by_stages,
    take,
    without_idle,
)
from disttrain_cli.planning.units import Cluster, Unit, holder_of, units_after
from disttrain_cli.spec.stage_graph import in_line

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Which rows a strategy allows: (unit number, slot, rows) → rows kept.
Keep = Callable[[int, int, Rows], NDArray[np.bool_]]
FIRST, FINER = 12, 16  # intervals at first, and after each refinement
REFINEMENTS = 2
AHEAD = 1.06  # how far beyond a limit the first bound looks, to raise the next one at once
STEPS = 48  # GPU counts at which a bound of a slot size is evaluated
BLOCKS = 64  # GPU ranges in which more than two units besides the LLM are combined


@cache
def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def rough_floor(units: list[Unit], size: int, cluster: Cluster) -> float:
    """Lower bound of a step for slots of `size` sequences, in closed form.

    On x GPUs a side unit takes at least b + w/x (`_hyperbola`), so all of them together on the R
    that the LLM leaves take Σb + (Σ√w)² / R, and their slowest stage at least their work over R. R
    is cut into ranges. The slowest of several encoders takes at least their mean weighted by w,
    which is one such unit: Σbw/Σw + Σw/x.
    """
    slots, edges = (
        cluster.batch // size,
        np.linspace(0, cluster.gpus, STEPS + 1).astype(np.int64)[:, None],
    )
    llm = holder_of(units)
    holder, sides = (
        units[llm],
        [_hyperbola(unit, size, cluster.gpus) for unit in units if not unit.holds_llm],
    )
    work = sum(side[2] for side in sides)
    if llm > 1:
        weight = sum(side[1] for side in sides[:llm])
        mean = sum(side[0] * side[1] for side in sides[:llm]) / weight if weight else 0.0
        sides = [(mean, weight, 0.0), *sides[llm:]]
    base, root = sum(side[0] for side in sides), sum(side[1] ** 0.5 for side in sides)
    fewest, most = edges[:-1], edges[1:]  # of the LLM
    left = cluster.gpus - fewest
    rows = list_rows(holder, size, slots, cluster.gpus, 0)
    pp = np.minimum(most // rows.stage_gpus, holder.layers)
    steady = np.maximum(rows.slowest_ms(np.maximum(pp, rows.least_stages)), work / left)
    times = rows.unit_ms + base + root**2 / left + (slots - 1) * steady
    return float(times[pp >= rows.least_stages].min(initial=np.inf)) * SAFE


def _hyperbola(unit: Unit, size: int, gpus: int) -> tuple[float, float, float]:
    """(b, w, work): a side unit takes at least b + w/x on x GPUs, and `work` GPU·ms; from
    `busiest_load`."""
    images, kinds = size * unit.items_per_sequence, unit.kinds
    base = kinds.base_ms @ kinds.count
    each = kinds.slope_ms @ kinds.count / max(unit.items_per_sequence, 1e-300)
    if images <= 1:
        base, each = base + np.minimum(0.0, each * images), 0.0 * each
    base, slope = base + 0.5 * each, np.maximum(0.0, images - 0.5) * each * kinds.tp
    work = kinds.tp * np.minimum(base, base * gpus) + slope
    return max(0.0, base.min()), max(0.0, slope.min()), max(0.0, work.min())


@dataclass(frozen=True)
class Space:
    """All shapes of all units for one slot size."""

    units: list[Unit]
    size: int  # sequences of a slot
    slots: int
    gpus: int
    shares: list[int]  # most GPUs of each unit
    rows: list[Rows]  # by unit
    holder: int  # number of the unit that holds the LLM
    llm: Options  # its options
    least_ms: list[float]  # by unit
    floor_ms: float  # of a step
    # slowest stage by PP of rows of the LLM that were looked at
    exact_ms: dict[tuple[int, int, bool], Floats]

    @property
    def combinations(self) -> float:
        """Layouts: products of shapes, not all of which fit the GPUs together."""
        return float(
            np.prod(
                [
                    float(np.maximum(0, share // rows.stage_gpus - rows.least_stages + 1).sum())
                    for rows, share in zip(self.rows, self.shares, strict=True)
                ]
            )
        )


def space_of(
    units: list[Unit],
    size: int,
    cluster: Cluster,
    shares: list[int],
    keep: Keep | None,
    top: int = 1,
) -> Space:
    """The shapes that the `top` best layouts with slots of `size` sequences may have; a lower bound
    of a step."""
    slots = cluster.batch // size
    rows = [
        list_rows(unit, size, slots, share, after)
        for unit, share, after in zip(units, shares, units_after(units), strict=True)
    ]
    if keep is not None:
        rows = [take(part, keep(number, size, part)) for number, part in enumerate(rows)]
    holder = holder_of(units)
    rows = [
        part if number == holder else without_idle(units[number], part, size, slots, top)
        for number, part in enumerate(rows)
    ]
    mine = rows[holder]
    stages = np.arange(1, units[holder].layers + 1)
    row, index = np.nonzero(
        (stages >= mine.least_stages[:, None])
        & (stages * mine.stage_gpus[:, None] <= shares[holder])
    )
    space = Space(
        units,
        size,
        slots,
        cluster.gpus,
        shares,
        rows,
        holder,
        options_of(mine, row, stages[index]),
        [float(part.unit_ms.min(initial=np.inf)) for part in rows],
        np.inf,
        {},
    )
    return replace(space, floor_ms=_floor(space)) if all(len(part) for part in rows) else space


def _floor(space: Space) -> float:
    """Lower bound of a step: every side unit perfectly divisible, but no faster than its fastest
    row on its GPUs."""
    sides = [
        (rows, share)
        for u, (rows, share) in enumerate(zip(space.rows, space.shares, strict=True))
        if u != space.holder
    ]
    tables = _groups(
        [_least_ms(rows, rows.least_stages[None, :], share, space.gpus) for rows, share in sides],
        space.holder,
    )
    work = sum(float((rows.unit_ms * rows.stage_gpus).min()) for rows, _ in sides)
    left = space.gpus - np.unique(
        np.linspace(0, space.gpus, min(STEPS, space.gpus) + 1).astype(np.int64)
    )  # descending
    if not tables:
        return float((space.llm.unit_ms + (space.slots - 1) * space.llm.stage_ms).min()) * SAFE
    rest = np.array([_together(tables, 0, int(count)) for count in left])
    steady = work / np.maximum(left, 1)
    # at most so many are left
    index = np.searchsorted(-left, space.llm.gpus - space.gpus, side="right") - 1
    times = (
        space.llm.unit_ms
        + rest[index]
        + (space.slots - 1) * np.maximum(space.llm.stage_ms, steady[index])
    )
    return float(times.min()) * SAFE


def _least_ms(rows: Rows, stages: Ints, share: int, gpus: int) -> Floats:
    """[T, gpus + 1] least time of a unit by GPUs at most, where its rows have so many stages [T,
    B]."""
    needed = stages * rows.stage_gpus
    slowest_first = np.argsort(-rows.unit_ms, kind="stable")
    needed = np.minimum(needed[:, slowest_first], gpus + 1)
    needed[needed > share] = gpus + 1
    table = np.full((len(stages), gpus + 2), np.inf)
    # of equal places the last one stays
    table[np.arange(len(stages))[:, None], needed] = rows.unit_ms[slowest_first]
    table[:, -1] = np.inf
    return np.minimum.accumulate(table[:, :-1], axis=1)


def _together(tables: list[Floats], interval: int, left: int) -> float:
    """Least time of one or two units (or groups of them) after each other, together on `left`
    GPUs."""
    if len(tables) == 1:
        return float(tables[0][interval, left])
    return float((tables[0][interval, : left + 1] + tables[1][interval, left::-1]).min())


def _groups(tables: list[Floats], encoders: int) -> list[Floats]:
    """Least time by GPUs of the first units, encoders side by side, and of the others, as far as
    there are such."""
    groups = ((tables[:encoders], np.maximum), (tables[encoders:], np.add))
    return [_merged(group, join) for group, join in groups if group]


def _merged(tables: list[Floats], join: np.ufunc) -> Floats:
    """Several units' least time by GPUs as one table; a lower bound where they are several: GPUs in
    blocks.

    `join` makes one time of two: `np.add`, or `np.maximum` for units side by side.
    """
    first = tables[0]
    for other in tables[1:]:
        size = first.shape[1]
        ends = np.unique(np.linspace(0, size, BLOCKS + 1).astype(int))
        merged = np.full_like(first, np.inf)
        for start, stop in pairwise(ends):  # the first unit has start .. stop - 1
            merged[:, start:] = np.minimum(
                merged[:, start:], join(first[:, [stop - 1]], other[:, : size - start])
            )
        first = merged
    return first


@dataclass(frozen=True)
class _Level:
    """A set of intervals of τ, and what the side units need in each."""

    lower_ms: Floats  # [T]
    upper_ms: Floats
    stages: list[Ints]  # by side unit: [T, B] fewest stages
    tables: list[Floats]  # by side unit: [T, gpus + 1] least time by GPUs at most


@dataclass(frozen=True)
class _Pairs:
    """Pairs of an option of the LLM and an interval that may be within a limit."""

    option: Ints  # [P]
    interval: Ints
    own_ms: Floats  # what the LLM and the slowest stage take
    times_ms: Floats  # lower bound of a step

    @property
    def least_ms(self) -> float:
        """Of a step, over all pairs."""
        return float(self.times_ms.min(initial=np.inf))


def narrowed(space: Space, limit: float) -> tuple[list[Options] | None, float]:
    """Every option, by unit, that a layout within the limit may need; and a lower bound of a step's
    time.

    Where that bound exceeds the limit there are none.
    """
    look, slots = limit * AHEAD, space.slots
    llm = take(
        space.llm,
        _warmup_ms(space, space.holder, space.llm.unit_ms) + _steady_ms(space.llm.stage_ms, slots)
        <= look,
    )
    if not len(llm):
        return None, look
    others = [number for number in range(len(space.rows)) if number != space.holder]
    room = space.gpus - int(llm.gpus.min()) - len(others) + 1  # GPUs of a side unit
    sides = []
    for number in others:
        rows = space.rows[number].behind(min(slots, _later(space, number, llm) + 1))
        within = (
            _warmup_ms(space, number, rows.unit_ms)
            + _steady_ms(rows.slowest_ms(rows.layers), slots)
            <= look
        )
        sides.append(take(rows, within & (rows.stage_gpus * rows.least_stages <= room)))
    if not all(len(rows) for rows in sides):
        return None, look
    shares = [space.shares[number] for number in others]
    spread = look - max(in_line(space.least_ms, space.holder))
    level = _level(space.gpus, shares, sides, *_intervals(space, llm, sides, spread))
    options = np.unique(_pairs(space, level, llm, look).option)
    llm = _sharpened(space, llm, options, units_after(space.units)[space.holder])
    pairs = _pairs(space, level, llm, look)
    if not pairs.least_ms <= limit or not len(pairs.option):
        return None, min(pairs.least_ms, look)
    for _ in range(REFINEMENTS if slots > 1 else 0):
        pairs = _within(pairs, limit)
        sides = [
            take(rows, np.unique(_beside(space, level, pairs, llm, number, share, rows, limit)[0]))
            for number, (share, rows) in enumerate(zip(shares, sides, strict=True))
        ]
        slowest = np.full(1, level.upper_ms[pairs.interval].max())
        sides = [
            fitting(
                space.units[number], rows, space.size, slots, _later(space, number, llm), slowest
            )
            for number, rows in zip(others, sides, strict=True)
        ]
        if not all(len(rows) for rows in sides):
            return None, limit
        level = _level(space.gpus, shares, sides, *_finer(level, np.unique(pairs.interval)))
        pairs = _pairs(space, level, llm, limit)
        if not len(pairs.option):
            return None, limit
    chosen = [
        options_of(rows, *_beside(space, level, pairs, llm, number, share, rows, limit))
        for number, (share, rows) in enumerate(zip(shares, sides, strict=True))
    ]
    chosen.insert(space.holder, take(llm, np.unique(pairs.option)))
    return (chosen if all(len(options) for options in chosen) else None), pairs.least_ms


def _warmup_ms(space: Space, number: int, unit_ms: Floats) -> Floats:
    """Lower bound of the warm-up where a unit takes so long."""
    encoders, line = space.least_ms[: space.holder], space.least_ms[space.holder :]
    if number < space.holder:
        return sum(line) + np.maximum(unit_ms, max(encoders))
    return unit_ms + (max(encoders, default=0.0) + sum(line) - space.least_ms[number])


def _later(space: Space, number: int, llm: Options) -> int:
    """Stages that come after a side unit, at least."""
    return units_after(space.units)[number] + (
        int(llm.pp.min()) - 1 if number < space.holder else 0
    )


def _within(pairs: _Pairs, limit: float) -> _Pairs:
    """Those of the pairs that may be within a limit."""
    kept = pairs.times_ms <= limit
    return _Pairs(
        pairs.option[kept], pairs.interval[kept], pairs.own_ms[kept], pairs.times_ms[kept]
    )


def _sharpened(space: Space, llm: Options, chosen: Ints, later_units: int) -> Options:
    """The chosen options of the LLM with their exact slowest stage, should one stage of each later
    unit follow."""
    llm = take(llm, chosen)
    exact = np.empty(len(llm))
    for index, (tp, dp, pp, checkpointing) in enumerate(
        zip(llm.tp, llm.dp, llm.pp, llm.checkpointing, strict=True)
    ):
        row = (int(tp), int(dp), bool(checkpointing))
        if row not in space.exact_ms:
            space.exact_ms[row] = slowest_by_stages(
                space.units[space.holder],
                *row,
                space.size,
                space.slots,
                later_units,
                space.shares[space.holder],
            )
        exact[index] = space.exact_ms[row][pp]
    return replace(take(llm, np.isfinite(exact)), stage_ms=exact[np.isfinite(exact)] * SAFE)


def _steady_ms(stage_ms: Floats, slots: int) -> Floats:
    """Time of all slots but the first; none for one slot, however slow (even infinite) its
    stages."""
    return (slots - 1) * stage_ms if slots > 1 else np.zeros_like(stage_ms)


def _intervals(
    space: Space, llm: Options, sides: list[Rows], spread: float
) -> tuple[Floats, Floats]:
    """Intervals that hold every possible time of the slowest stage."""
    if space.slots == 1:
        return np.zeros(1), np.full(1, np.inf)
    work = float((llm.stage_ms * llm.gpus).min()) + sum(
        float((rows.unit_ms * rows.stage_gpus).min()) for rows in sides
    )
    lowest = (
        max([work / space.gpus, llm.stage_ms.min(), *(rows.longest_ms.min() for rows in sides)])
        * SAFE
    )
    slowest = max([llm.unit_ms.max(), *(rows.unit_ms.max() for rows in sides)])
    highest = min(spread / (space.slots - 1), slowest) / SAFE
    if highest < lowest:
        return np.zeros(0), np.zeros(0)
    edges = np.geomspace(max(lowest, highest * 1e-6), highest, FIRST + 1)
    edges[0], edges[-1] = lowest, highest
    return edges[:-1], edges[1:]


def _finer(level: _Level, left: Ints) -> tuple[Floats, Floats]:
    """The intervals that are left, each cut into as many."""
    parts = max(2, -(-FINER // len(left)))
    edges = np.linspace(level.lower_ms[left], level.upper_ms[left], parts + 1, axis=1)
    return edges[:, :-1].ravel(), edges[:, 1:].ravel()


def _level(gpus: int, shares: list[int], sides: list[Rows], lower: Floats, upper: Floats) -> _Level:
    """Stages and least times of the side units, on at most `shares` GPUs each."""
    stages = [rows.stages(upper[:, None]) for rows in sides]
    return _Level(
        lower,
        upper,
        stages,
        [
            _least_ms(rows, count, share, gpus)
            for rows, count, share in zip(sides, stages, shares, strict=True)
        ],
    )


def _pairs(space: Space, level: _Level, llm: Options, limit: float) -> _Pairs:
    """Every pair of an option of the LLM and an interval that may be within the limit."""
    count = len(level.lower_ms)
    # GPUs; `gpus + 1` where no row is so fast
    fewest = [np.isinf(table).sum(axis=1) for table in level.tables]
    own_ms = llm.unit_ms[:, None] + _steady_ms(
        np.maximum(level.lower_ms, llm.stage_ms[:, None]), space.slots
    )
    left = space.gpus - llm.gpus[:, None] - sum(fewest)
    each = [
        table[np.arange(count), np.clip(left + least, 0, space.gpus)]
        for table, least in zip(level.tables, fewest, strict=True)
    ]
    quick = (
        own_ms
        + sum(each[space.holder :])
        + np.max([np.zeros_like(left), *each[: space.holder]], axis=0)
    )
    option, interval = np.nonzero(
        (llm.stage_ms[:, None] <= level.upper_ms) & (left >= 0) & (quick <= limit)
    )
    own_ms = own_ms[option, interval]
    if len(level.tables) > 1 and len(option):
        cases, case = np.unique(
            np.stack([interval, space.gpus - llm.gpus[option]]), axis=1, return_inverse=True
        )
        merged = _groups(level.tables, space.holder)
        times = (
            own_ms
            + np.array([_together(merged, int(at), int(count)) for at, count in cases.T])[
                case.ravel()
            ]
        )
    else:
        times = quick[option, interval]
    return _within(
        _Pairs(option, interval, own_ms, np.where(np.isfinite(times), times, np.nan)), limit
    )


def _beside(
    space: Space,
    level: _Level,
    pairs: _Pairs,
    llm: Options,
    number: int,
    share: int,
    rows: Rows,
    limit: float,
) -> tuple[Ints, Ints]:
    """The options of a side unit, as row and PP, that fit beside some pair within the limit."""
    others = [table for other, table in enumerate(level.tables) if other != number]
    encoders = space.holder - (number < space.holder)
    whole_ms = line_ms = _others_ms(space, level, pairs, llm, others, encoders)
    # of the other encoders only the GPUs count where this one is slower
    if number < space.holder and encoders:
        idle = [np.where(np.isfinite(table), 0.0, np.inf) for table in others[:encoders]]
        line_ms = _others_ms(space, level, pairs, llm, idle + others[encoders:], encoders)
    interval = np.unique(pairs.interval)
    index, row = np.nonzero(level.stages[number][interval] * rows.stage_gpus <= share)
    interval, pp = interval[index], level.stages[number][interval[index], row]
    beside: list[Ints] = []
    while len(row):
        gpus = np.minimum(rows.stage_gpus[row] * pp, space.gpus + 1)
        kept = (rows.unit_ms[row] + line_ms[interval, gpus] <= limit) & (
            whole_ms[interval, gpus] <= limit
        )
        kept &= (gpus <= share) & (pp <= rows.layers[row])
        interval, row, pp = interval[kept], row[kept], pp[kept]
        beside.append(row * NEVER + pp)
        pp = pp + 1
    return np.divmod(np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *beside])), NEVER)


def _others_ms(
    space: Space, level: _Level, pairs: _Pairs, llm: Options, others: list[Floats], encoders: int
) -> Floats:
    """[T, gpus + 2] by GPUs of one side unit, the least time of everything else in some pair.

    `others` are the tables of the other side units, the first of them encoders. The last column:
    too many GPUs.
    """
    groups = _groups(others, encoders)
    rest = _merged(groups, np.add) if groups else np.zeros((len(level.lower_ms), space.gpus + 1))
    least_ms = np.full((len(level.lower_ms), space.gpus + 2), np.inf)
    left = space.gpus - llm.gpus[pairs.option]
    order = np.lexsort((pairs.own_ms, left, pairs.interval))
    first = np.ones(len(order), dtype=bool)
    first[1:] = (np.diff(left[order]) != 0) | (np.diff(pairs.interval[order]) != 0)
    for pair in order[first]:  # of equal GPUs the option that takes least
        interval, count = pairs.interval[pair], left[pair]
        row = least_ms[interval, : count + 1]
        np.minimum(row, pairs.own_ms[pair] + rest[interval, count::-1], out=row)
    return least_ms
