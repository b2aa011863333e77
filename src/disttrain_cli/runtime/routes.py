"""The transfer index: which rows travel between two replicas at a cut, derived on every rank from the ordering.

Nothing about shapes is ever sent. Items that both sides of a cut work on travel in canonical order; a route lists
where their rows lie on this side. The same route, read in the other direction, carries the gradients
(mission.md's broker rule: any two DP sizes, samples in order).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disttrain_cli.data.slots import Slot


@dataclass(frozen=True)
class Route:
    """Rows of one state tensor shared with one replica of the other side of a cut."""

    replica: int  # of the other side
    runs: tuple[tuple[int, int], ...]  # (start, length) in this side's tensor, merged, in canonical item order
    rows: int


def local_rows(slot: Slot, item: str, column: str, unit: str, replica: int) -> int:
    """Rows of a replica's own tensor."""
    return int(slot.rows(item, column)[slot.items(unit, replica, item)].sum())


def routes(slot: Slot, item: str, column: str, here: tuple[str, int], there: str) -> list[Route]:
    """Routes between replica `here` (unit, replica) and all replicas of unit `there`; pairs without rows are left out.

    Inside one unit a replica exchanges everything with its own namesake, in its own order.
    """
    unit, replica = here
    mine = slot.items(unit, replica, item)
    counts = slot.rows(item, column)
    if unit == there:
        rows = int(counts[mine].sum())
        return [Route(replica, ((0, rows),), rows)] if rows else []
    starts = np.concatenate(([0], np.cumsum(counts[mine])))[:-1]
    start_of = np.full(len(counts), -1, dtype=np.int64)
    start_of[mine] = starts
    found = []
    for other in range(len(slot.replicas[there])):
        theirs = np.sort(slot.items(there, other, item))
        shared = theirs[start_of[theirs] >= 0]
        if len(shared) and (rows := int(counts[shared].sum())):
            found.append(Route(other, _merge(start_of[shared], counts[shared]), rows))
    return found


def _merge(starts: np.ndarray, lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Join runs that follow each other without a gap."""
    ends = starts + lengths
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    firsts = np.concatenate(([0], breaks))
    lasts = np.concatenate((breaks, [len(starts)])) - 1
    return tuple((int(starts[a]), int(ends[b] - starts[a])) for a, b in zip(firsts, lasts, strict=True))
