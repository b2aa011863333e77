"""Transfer index: rows that two ranks exchange at a cut, derived on every rank from the ordering.

Shapes are never sent. Items that both sides of a cut work on are transferred in canonical order; a
route lists the positions of their rows on this side. The same route, read in the other direction,
carries the gradients (any two DP sizes, samples in order). Of a replica's rows every rank sends and
receives its own part (`division.Place`) and no other, whatever the TP and CP sizes of both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from disttrain_cli.data.slots import Ints, Slot
from disttrain_cli.models.division import Place
from disttrain_cli.spec.stage_graph import RankCoords, Stage


@dataclass(frozen=True)
class End:
    """One side of a cut: a unit, its TP and CP sizes, and for this side the rank's coordinates."""

    unit: str
    tp: int = 1
    replica: int = 0
    tp_rank: int = 0
    cp: int = 1
    cp_rank: int = 0

    @classmethod
    def of(cls, coords: RankCoords) -> End:
        """Return the side of a rank."""
        unit = coords.unit
        return cls(unit.name, unit.tp, coords.replica, coords.tp_rank, unit.cp, coords.cp_rank)

    @classmethod
    def at(cls, stage: Stage) -> End:
        """Return the side of a stage."""
        return cls(stage.unit.name, stage.tp, cp=stage.cp)

    @property
    def place(self) -> Place:
        """Coordinates of the rank among those that share the replica's rows."""
        return Place(self.tp, self.tp_rank, self.cp, self.cp_rank)


def place_of(coords: RankCoords) -> Place:
    """Return a rank's coordinates among those that share its replica's work on a stage."""
    unit = coords.unit
    return replace(End.of(coords).place, gathers=unit.gathers, replicated=frozenset(unit.module_tp))


@dataclass(frozen=True)
class Route:
    """Rows of one state tensor shared with one rank of the other side of a cut."""

    replica: int  # of the other side
    tp_rank: int  # of the other side
    # (start, length) among this rank's rows, merged, in canonical item order
    runs: tuple[tuple[int, int], ...]
    rows: int
    cp_rank: int = 0  # of the other side


def local_rows(slot: Slot, item: str, column: str, unit: str, replica: int) -> int:
    """Return the number of rows of a replica's own tensor."""
    return int(slot.rows(item, column)[slot.replicas[unit][replica][item]].sum())


def routes(slot: Slot, item: str, column: str, here: End, there: End) -> list[Route]:
    """Return routes between a rank `here` and all ranks of the unit `there`, omitting empty ones.

    Inside one unit a rank exchanges all its rows, in order, with the rank of the same coordinates.
    """
    counts = slot.rows(item, column)
    mine = slot.replicas[here.unit][here.replica][item]
    first, last = here.place.own_rows(int(counts[mine].sum()))
    if here.unit == there.unit:
        whole, rows = ((0, last - first),), last - first
        return [Route(here.replica, here.tp_rank, whole, rows, here.cp_rank)] if rows else []
    start_of = _starts(mine, counts)
    all_routes = []
    for replica in range(len(slot.replicas[there.unit])):
        theirs = slot.replicas[there.unit][replica][item]
        shared = np.sort(theirs[start_of[theirs] >= 0])
        if len(shared):
            starts, lengths = start_of[shared], counts[shared]
            other = _starts(theirs, counts)[shared]
            total = int(counts[theirs].sum())
            for place, (low, high) in _parts(total, there):
                # rows of each item that are both in this rank's part and in that rank's part
                begin = np.maximum(0, np.maximum(first - starts, low - other))
                end = np.minimum(lengths, np.minimum(last - starts, high - other))
                some = end > begin
                if some.any():
                    runs = _merge((starts + begin - first)[some], (end - begin)[some])
                    all_routes.append(
                        Route(
                            replica,
                            place.tp_rank,
                            runs,
                            sum(length for _, length in runs),
                            place.cp_rank,
                        )
                    )
    return all_routes


def _parts(rows: int, there: End) -> Iterator[tuple[Place, tuple[int, int]]]:
    for tp_rank in range(there.tp):
        for cp_rank in range(there.cp):
            place = replace(there.place, tp_rank=tp_rank, cp_rank=cp_rank)
            yield place, place.own_rows(rows)


def _starts(items: Ints, counts: Ints) -> Ints:
    """Return the first row of each item in a replica's tensor; -1 for items of other replicas."""
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
