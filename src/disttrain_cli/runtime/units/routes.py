"""The transfer index: which rows travel between two ranks at a cut, derived on every rank from the
ordering.

Nothing about shapes is ever sent. Items that both sides of a cut work on travel in canonical order;
a route lists where their rows lie on this side. The same route, read in the other direction,
carries the gradients (mission.md's broker rule: any two DP sizes, samples in order). Of a replica's
rows every TP rank sends and receives its own part (`division.own_rows`) and no other, whatever the
TP sizes of both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from disttrain_cli.data.slots import Ints, Slot
from disttrain_cli.models.division import own_rows


@dataclass(frozen=True)
class End:
    """One side of a cut: a unit, its TP size, and for this side who asks."""

    unit: str
    tp: int = 1
    replica: int = 0
    tp_rank: int = 0


@dataclass(frozen=True)
class Route:
    """Rows of one state tensor shared with one rank of the other side of a cut."""

    replica: int  # of the other side
    tp_rank: int  # of the other side
    # (start, length) in this rank's own rows, merged, in canonical item order
    runs: tuple[tuple[int, int], ...]
    rows: int


def local_rows(slot: Slot, item: str, column: str, unit: str, replica: int) -> int:
    """Rows of a replica's own tensor."""
    return int(slot.rows(item, column)[slot.replicas[unit][replica][item]].sum())


def routes(slot: Slot, item: str, column: str, here: End, there: End) -> list[Route]:
    """Routes between a rank `here` and all ranks of the unit `there`; pairs without rows are left
    out.

    Inside one unit a rank exchanges everything with its own namesake, in its own order.
    """
    counts = slot.rows(item, column)
    mine = slot.replicas[here.unit][here.replica][item]
    first, last = own_rows(int(counts[mine].sum()), here.tp, here.tp_rank)
    if here.unit == there.unit:
        whole = ((0, last - first),)
        return [Route(here.replica, here.tp_rank, whole, last - first)] if last > first else []
    start_of = _starts(mine, counts)
    all_routes = []
    for replica in range(len(slot.replicas[there.unit])):
        theirs = slot.replicas[there.unit][replica][item]
        shared = np.sort(theirs[start_of[theirs] >= 0])
        if len(shared):
            starts, lengths = start_of[shared], counts[shared]
            other = _starts(theirs, counts)[shared]
            total = int(counts[theirs].sum())
            for tp_rank, (low, high) in _parts(total, there.tp):
                # Rows of each item that lie in this rank's part here and in that rank's part there.
                begin = np.maximum(0, np.maximum(first - starts, low - other))
                end = np.minimum(lengths, np.minimum(last - starts, high - other))
                some = end > begin
                if some.any():
                    runs = _merge((starts + begin - first)[some], (end - begin)[some])
                    all_routes.append(
                        Route(replica, tp_rank, runs, sum(length for _, length in runs))
                    )
    return all_routes


def _parts(rows: int, tp: int) -> Iterator[tuple[int, tuple[int, int]]]:
    return ((rank, own_rows(rows, tp, rank)) for rank in range(tp))


def _starts(items: Ints, counts: Ints) -> Ints:
    """By item, where its rows start in a replica's tensor; -1 for those of others."""
    starts = np.full(len(counts), -1, dtype=np.int64)
    starts[items] = np.cumsum(counts[items]) - counts[items]
    return starts


def _merge(starts: Ints, lengths: Ints) -> tuple[tuple[int, int], ...]:
    """Join runs that follow each other without a gap."""
    ends = starts + lengths
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    firsts = np.concatenate(([0], breaks))
    lasts = np.concatenate((breaks, [len(starts)])) - 1
    return tuple(
        (int(starts[a]), int(ends[b] - starts[a])) for a, b in zip(firsts, lasts, strict=True)
    )
