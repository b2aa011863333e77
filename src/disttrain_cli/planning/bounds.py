"""Bounds: the shapes that may be part of a layout within a time limit, for one slot size.

**Statement.** `narrowed` returns, for every unit, options that include those of every layout that
takes at most the limit, and a lower bound of the time of any layout.

**Argument.** With n slots a step takes W + (n - 1) · τ: W sums the unit times of the sequential
chain (of the encoders, which are parallel branches, only the slowest counts), τ is the slowest
stage (`objective`). W is at least the sum of the least unit times, so within the limit τ is at most
some u. Hence

1. a row of a unit (`options.Rows`) needs the fewest stages at which its slowest stage may be at
   most u, known in closed form (`Rows.stages`), and at least the corresponding GPUs;
2. a unit takes at least the least unit time of the rows that fit its GPUs: a table by GPUs;
3. given an option of the LLM with g GPUs the others take at least the best way to share the
   remaining G - g between their tables, and the step at least that, plus the LLM's unit time, plus
   (n - 1) · its slowest stage. An option whose bound exceeds the limit is excluded;
4. an option of another unit is excluded if it exceeds the limit even with the best remaining option
   of the LLM and the best of the other tables on the remaining GPUs.

**Effect**: a search takes 3 times as long at 1,296 GPUs, and 10 times at 16,384, if each unit is
filtered on its own. Cutting τ into intervals, refining them, a floor of perfectly divisible units
and memory's part in the fewest stages had no further effect (docs/decisions/02-plan-search.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.planning.options import (
    NEVER,
    SAFE,
    Options,
    Rows,
    Table,
    list_rows,
    options_of,
    slowest_by_stages,
    take,
)
from disttrain_cli.planning.units import Cluster, Unit, holder_of, memoised, shape_at, units_after
from disttrain_cli.spec.stage_graph import in_line

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Filter of rows by a strategy: (unit index, slot, rows) → mask of rows kept.
Keep = Callable[[int, int, Rows], NDArray[np.bool_]]
STEPS = 48  # GPU counts at which a bound of a slot size is evaluated
PARTS = 8  # of a power of two of devices: step of row lists, which searches thus share
BLOCKS = 64  # GPU ranges for combining more than two units in addition to the LLM


@cache
def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def llm_floors(units: list[Unit], sizes: list[int], cluster: Cluster) -> list[float]:
    """Return a lower bound of a step for slots of each of these sizes, of the LLM's unit alone.

    All at once, without its memory: of most sizes nothing else is computed.
    """
    holder = units[holder_of(units)]
    kinds, most = holder.kinds, max(1, cluster.gpus - len(units) + 1)
    base_ms, slope_ms = kinds.base_ms @ kinds.count, kinds.slope_ms @ kinds.count
    dps = [np.array([dp for dp in divisors(size) if dp <= most], dtype=np.int64) for size in sizes]
    counts = np.array([len(each) for each in dps])
    dp, size = np.concatenate(dps)[:, None], np.repeat(sizes, counts)[:, None]
    pp = np.minimum(most // (kinds.tp_cp_size * dp), holder.layers)
    unit_ms = np.maximum(0.0, base_ms + slope_ms * (size / dp))
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(pp, unit_ms + (cluster.batch // size - 1) * unit_ms / pp, np.inf)
    starts = np.cumsum(counts) - counts
    return list(np.minimum.reduceat(times.min(axis=1), starts) * SAFE)


def rough_floor(units: list[Unit], size: int, cluster: Cluster) -> float:
    """Return a lower bound of a step for slots of `size` sequences, in closed form.

    On x GPUs a unit without the LLM takes at least b + w/x (`_hyperbola`), so all of them together
    on the R that the LLM leaves take Σb + (Σ√w)² / R, and their slowest stage at least their work
    over R. R is cut into ranges. The slowest of several encoders takes at least their mean weighted
    by w, which is one such unit: Σbw/Σw + Σw/x.
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
    fewest, most = edges[:-1], edges[1:]  # GPUs of the LLM
    left = cluster.gpus - fewest
    rows = list_rows(holder, size, slots, _listed(cluster, cluster.gpus), 0)
    pp = np.minimum(most // rows.stage_gpus, holder.layers)
    steady = np.maximum(rows.slowest_ms(np.maximum(pp, rows.least_stages)), work / left)
    times = rows.unit_ms + base + root**2 / left + (slots - 1) * steady
    return float(times[pp >= rows.least_stages].min(initial=np.inf)) * SAFE


@memoised
def _hyperbola(unit: Unit, size: int, gpus: int) -> tuple[float, float, float]:
    """Return (b, w, work) of a unit without the LLM, derived from `busiest_load`.

    It takes at least b + w/x ms on x GPUs, and `work` GPU·ms.
    """
    images, kinds = size * unit.items_per_sequence, unit.kinds
    base = kinds.base_ms @ kinds.count
    each = kinds.slope_ms @ kinds.count / max(unit.items_per_sequence, 1e-300)
    if images <= 1:
        base, each = base + np.minimum(0.0, each * images), 0.0 * each
    base, slope = base + 0.5 * each, np.maximum(0.0, images - 0.5) * each * kinds.tp_cp_size
    work = kinds.tp_cp_size * np.minimum(base, base * gpus) + slope
    return max(0.0, base.min()), max(0.0, slope.min()), max(0.0, work.min())


@dataclass(frozen=True)
class Space:
    """Shapes of all units for one slot size that a layout within a limit may have."""

    units: list[Unit]
    size: int  # sequences of a slot
    slots: int
    gpus: int
    shares: list[int]  # most GPUs of each unit
    within_ms: float  # the limit
    rows: list[Rows]  # by unit
    holder: int  # index of the unit that holds the LLM
    llm: Options  # its options
    least_ms: list[float]  # by unit

    @property
    def combinations(self) -> float:
        """Number of combinations of shapes, not all of which fit the GPUs together."""
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
    within_ms: float,
) -> Space:
    """Return the shapes of layouts with slots of `size` sequences.

    The other units have no more GPUs than the LLM leaves them in a layout within the limit.
    """
    slots, holder, afters = cluster.batch // size, holder_of(units), units_after(units)

    def rows_of(number: int, share: int) -> Rows:
        listed = _listed(cluster, share)
        rows = list_rows(units[number], size, slots, listed, afters[number])
        rows = take(rows, rows.stage_gpus * rows.least_stages <= share)
        return rows if keep is None else take(rows, keep(number, size, rows))

    mine = rows_of(holder, shares[holder])
    stages = np.arange(1, units[holder].layers + 1)
    row, index = np.nonzero(
        (stages >= mine.least_stages[:, None])
        & (stages * mine.stage_gpus[:, None] <= shares[holder])
    )
    llm = options_of(mine, row, stages[index])
    llm = take(llm, llm.unit_ms + _steady_ms(llm.stage_ms, slots) <= within_ms)
    left = cluster.gpus - int(llm.gpus.min(initial=cluster.gpus)) - (len(units) - 2)
    shares = [
        share if number == holder else min(share, left) for number, share in enumerate(shares)
    ]
    rows = [
        mine if number == holder else rows_of(number, share) for number, share in enumerate(shares)
    ]
    return Space(
        units,
        size,
        slots,
        cluster.gpus,
        shares,
        within_ms,
        rows,
        holder,
        llm,
        [float(part.unit_ms.min(initial=np.inf)) for part in rows],
    )


def _listed(cluster: Cluster, share: int) -> int:
    """Return the number of devices up to which rows are listed for a unit's share."""
    part = max(1, (1 << cluster.gpus.bit_length()) // PARTS)
    return -(-share // part) * part


def _least_ms(rows: Rows, stages: Ints, share: int, gpus: int) -> Floats:
    """Return [gpus + 1] a unit's least time on at most that many GPUs, at `stages` [B] per row."""
    needed = stages * rows.stage_gpus
    slowest_first = np.argsort(-rows.unit_ms, kind="stable")
    slowest_first = slowest_first[needed[slowest_first] <= min(share, gpus)]
    table = np.full(gpus + 1, np.inf)
    # among equal numbers of GPUs the last, fastest assignment wins
    table[needed[slowest_first]] = rows.unit_ms[slowest_first]
    return np.minimum.accumulate(table)


def _together(tables: list[Floats], left: int) -> float:
    """Return the least time of at most two units (or groups) in sequence, sharing `left` GPUs."""
    if not tables:
        return 0.0
    if len(tables) == 1:
        return float(tables[0][left])
    return float((tables[0][: left + 1] + tables[1][left::-1]).min())


def _groups(tables: list[Floats], encoders: int) -> list[Floats]:
    """Return least times by GPUs of the first units, encoders in parallel, and of the others.

    Empty groups are omitted.
    """
    groups = ((tables[:encoders], np.maximum), (tables[encoders:], np.add))
    return [_merged(group, join) for group, join in groups if group]


def _merged(tables: list[Floats], join: np.ufunc) -> Floats:
    """Return several units' least time by GPUs as one table.

    `join` combines two times: `np.add`, or `np.maximum` for parallel units. A lower bound if times
    of more than two are added (`_added`).
    """
    return reduce(_added, tables) if join is np.add else side_by_side(tables)


def _added(first: Floats, other: Floats) -> Floats:
    """Return a lower bound of the least time by GPUs of two units in sequence: GPUs in blocks."""
    size = len(first)
    ends = np.unique(np.linspace(0, size, BLOCKS + 1).astype(int))
    merged = np.full_like(first, np.inf)
    for start, stop in pairwise(ends):  # the first unit has start .. stop - 1
        merged[start:] = np.minimum(merged[start:], first[stop - 1] + other[: size - start])
    return merged


def side_by_side(tables: list[Floats]) -> Floats:
    """Return the least time by GPUs of the slowest among parallel units that share them.

    Exact: a time requires the fewest GPUs of every unit that reach it.
    """
    if len(tables) == 1:
        return tables[0]
    times = np.unique(np.concatenate(tables))
    times = times[np.isfinite(times)][::-1]
    needed = np.sum([np.searchsorted(-table, -times) for table in tables], axis=0)
    merged = np.full_like(tables[0], np.inf)
    possible = needed < len(merged)
    merged[needed[possible]] = times[possible]  # of equal numbers of GPUs the last, least wins
    return np.minimum.accumulate(merged)


@dataclass(frozen=True)
class _Side:
    """Unit without the LLM: its rows, and their requirements within the limit."""

    number: int
    share: int  # GPUs at most
    rows: Rows
    stages: Ints  # [B] fewest stages
    least_ms: Floats  # [gpus + 1] least time on at most that many GPUs


def narrowed(space: Space, limit: float) -> tuple[list[Options] | None, float]:
    """Return by unit all options that a layout within the limit may need, and a step's lower bound.

    None instead of options if that bound exceeds the limit.
    """
    slots, holder = space.slots, space.holder
    if not all(len(rows) for rows in space.rows):
        return None, space.within_ms if len(space.rows[holder]) else np.inf
    llm = _within(space, holder, space.llm, space.llm.stage_ms, limit)
    if not len(llm):
        return None, limit
    longest_ms = np.inf  # of the slowest stage
    if slots > 1:
        longest_ms = (limit - max(in_line(space.least_ms, holder))) / (slots - 1) / SAFE
    sides = []
    for number in range(len(space.rows)):
        if number != holder:
            rows = space.rows[number].behind(min(slots, _later(space, number, llm) + 1))
            rows = _within(space, number, rows, rows.slowest_ms(rows.layers), limit)
            sides.append(_side(space, number, rows, longest_ms))
    llm = take(llm, _steps_ms(space, llm, sides) <= limit)
    llm = _sharpened(space, llm, units_after(space.units)[holder])
    steps_ms = _steps_ms(space, llm, sides)
    llm = take(llm, steps_ms <= limit)
    if not len(llm):
        return None, limit
    options = [
        options_of(side.rows, *_within_with_llm(space, llm, sides, side, limit)) for side in sides
    ]
    options.insert(holder, llm)
    return (options if all(len(each) for each in options) else None), float(steps_ms.min())


def _within(space: Space, number: int, table: Table, stage_ms: Floats, limit: float) -> Table:
    """Return a unit's rows or options within the limit, all others taking their least time."""
    unit_ms = table.unit_ms  # type: ignore[attr-defined]
    least_ms = _warmup_ms(space, number, unit_ms) + _steady_ms(stage_ms, space.slots)
    return take(table, least_ms <= limit)


def _side(space: Space, number: int, rows: Rows, longest_ms: float) -> _Side:
    stages, share = rows.stages(longest_ms), space.shares[number]
    return _Side(number, share, rows, stages, _least_ms(rows, stages, share, space.gpus))


def _steps_ms(space: Space, llm: Options, sides: list[_Side]) -> Floats:
    """Return a lower bound of a step with each option of the LLM."""
    groups = _groups([side.least_ms for side in sides], space.holder)
    left, which = np.unique(space.gpus - llm.gpus, return_inverse=True)
    others_ms = np.array([_together(groups, int(count)) for count in left])
    return _llm_ms(space, llm) + others_ms[which.reshape(-1)]


def _llm_ms(space: Space, llm: Options) -> Floats:
    return np.asarray(llm.unit_ms + _steady_ms(llm.stage_ms, space.slots))


def _warmup_ms(space: Space, number: int, unit_ms: Floats) -> Floats:
    """Return a lower bound of the warm-up if the unit takes `unit_ms`."""
    encoders, line = space.least_ms[: space.holder], space.least_ms[space.holder :]
    if number < space.holder:
        return sum(line) + np.maximum(unit_ms, max(encoders))
    return unit_ms + (max(encoders, default=0.0) + sum(line) - space.least_ms[number])


def _later(space: Space, number: int, llm: Options) -> int:
    """Return the fewest stages after a unit without the LLM: its additional slots in flight."""
    return units_after(space.units)[number] + (
        int(llm.pp.min()) - 1 if number < space.holder else 0
    )


def _sharpened(space: Space, llm: Options, later_units: int) -> Options:
    """Return the LLM's options with exact slowest stages, each later unit having one stage."""
    exact = np.empty(len(llm))
    for index in range(len(llm)):
        exact[index] = slowest_by_stages(
            space.units[space.holder],
            shape_at(llm, index, dp=int(llm.dp[index])),
            space.size,
            space.slots,
            later_units,
            space.shares[space.holder],
        )[llm.pp[index]]
    return replace(take(llm, np.isfinite(exact)), stage_ms=exact[np.isfinite(exact)] * SAFE)


def _steady_ms(stage_ms: Floats, slots: int) -> Floats:
    """Return the time of all slots but the first; zero for one slot, even with infinite stages."""
    return (slots - 1) * stage_ms if slots > 1 else np.zeros_like(stage_ms)


def _within_with_llm(
    space: Space, llm: Options, sides: list[_Side], side: _Side, limit: float
) -> tuple[Ints, Ints]:
    """Return a unit's options, as row and PP, that fit some LLM option within the limit."""
    others = [other.least_ms for other in sides if other is not side]
    encoders = space.holder - (side.number < space.holder)
    whole_ms = line_ms = _others_ms(space, llm, _groups(others, encoders))
    # if this encoder is slower than the others, only their GPUs count
    if side.number < space.holder and encoders:
        idle = [np.where(np.isfinite(table), 0.0, np.inf) for table in others[:encoders]]
        line_ms = _others_ms(space, llm, _groups(idle + others[encoders:], encoders))
    row, pp = np.arange(len(side.rows)), side.stages
    fitting: list[Ints] = []
    while len(row):
        gpus = side.rows.stage_gpus[row] * pp
        kept = (gpus <= min(side.share, space.gpus)) & (pp <= side.rows.layers[row])
        row, pp, gpus = row[kept], pp[kept], gpus[kept]
        kept = side.rows.unit_ms[row] + line_ms[gpus] <= limit
        kept &= whole_ms[gpus] <= limit
        row, pp = row[kept], pp[kept]
        fitting.append(row * NEVER + pp)
        pp = pp + 1
    return np.divmod(np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *fitting])), NEVER)


def _others_ms(space: Space, llm: Options, groups: list[Floats]) -> Floats:
    """Return [gpus + 1] the least time of everything else, by the GPUs of one unit.

    Everything else is the LLM's best option and the other units on the remaining GPUs.
    """
    rest = _merged(groups, np.add) if groups else np.zeros(space.gpus + 1)
    least_ms = np.full(space.gpus + 1, np.inf)
    left, llm_ms = space.gpus - llm.gpus, _llm_ms(space, llm)
    order = np.lexsort((llm_ms, left))
    for option in order[np.diff(left[order], prepend=-1) != 0]:  # the fastest among equal GPUs
        count = left[option]
        fast = least_ms[: count + 1]
        np.minimum(fast, llm_ms[option] + rest[count::-1], out=fast)
    return least_ms
