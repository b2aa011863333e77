"""Distribution of sequences to bins (replicas of a unit, slots of a step) by several loads at once.

Image-heavy and text-heavy sequences load different units, so one number per sequence cannot balance
all of them. Sequences are first dealt by the sum of their loads, longest first with equal counts,
as in the paper; then two sequences of different bins are exchanged while that brings the loads
closer to the targets. All numbers are integers, so the result is the same on every machine.
"""

from __future__ import annotations

import heapq

import numpy as np

from disttrain_cli.data.slots import Ints

UNIT = 2**16  # a load's mean per sequence, as an integer
EXCHANGES_PER_BIN = 6  # at most, on average
# limit of candidate exchanges in all, after the first round: the most that 2,048 sequences need
MOST_WEIGHED = 6 * 2048**2
TOLERANCE = 0.0005  # of a bin's mean load: a closer bin is not improved


def fit(costs: Ints, targets: Ints) -> Ints:
    """Return positions [bins, N / bins] of the sequences of every bin, ascending.

    Args:
        costs: [N, U] integer loads of every sequence.
        targets: [bins, U] target loads of every bin, in any unit: their sums are scaled to those of
            `costs`.
    """
    bins = len(targets)
    count, scaled = len(costs) // bins, _scaled(costs, len(costs))
    goal = _scaled(targets, len(costs))
    members = _dealt(scaled.sum(axis=1), goal.sum(axis=1), count)
    over = scaled[members].sum(axis=1) - goal  # [bins, U]
    near = (TOLERANCE * UNIT * count) ** 2
    bin_of = np.empty(len(costs), dtype=np.int64)
    bin_of[members] = np.arange(bins)[:, None]
    distance = (over**2).sum(axis=1)  # 0 if no exchange helps
    # floats represent such integers exactly, and their products are fast
    largest, farthest = int(scaled.max()), int((over.astype(float) ** 2).sum() ** 0.5) + 1
    small = 8 * scaled.shape[1] * largest * (largest + farthest) < 2**53
    own = scaled.astype(np.float64 if small else np.int64)
    columns, others = own.T.copy(), over[bin_of].T.astype(own.dtype)  # [U, N]
    squares = (columns**2).sum(axis=0)
    for _ in range(min(EXCHANGES_PER_BIN * bins, 1 + MOST_WEIGHED // (count * len(costs)))):
        worst = int(distance.argmax())
        if distance[worst] <= near:
            break
        mine = members[worst]
        # An exchange of i for j changes the squares of both bins by 2 · Σ d (d + apart_j), d =
        # own_j - own_i.
        sums = columns - others + over[worst][:, None]
        change = own[mine] @ (columns + sums)
        np.subtract((columns * sums).sum(axis=0), change, out=change)
        change += squares[mine][:, None]
        change[:, mine] = 0
        index, other = divmod(int(change.argmin()), len(costs))
        if change[index, other] >= 0:
            distance[worst] = 0
            continue
        partner, moved = int(bin_of[other]), int(mine[index])
        over[worst] += scaled[other] - scaled[moved]
        over[partner] -= scaled[other] - scaled[moved]
        members[partner][members[partner] == other] = moved
        members[worst][index] = other
        bin_of[other], bin_of[moved] = worst, partner
        for number in (worst, partner):
            distance[number] = (over[number] ** 2).sum()
            others[:, members[number]] = over[number][:, None]
    return np.sort(members, axis=1)


def _scaled(amounts: Ints, sequences: int) -> Ints:
    """Scale each column so that its mean per sequence is `UNIT`."""
    total = np.maximum(1, amounts.sum(axis=0, dtype=np.int64))
    return (amounts.astype(np.float64) * (UNIT * sequences) / total).astype(np.int64)


def _dealt(costs: Ints, goal: Ints, count: int) -> Ints:
    """Deal sequences [bins, count], largest first, each to the bin farthest below its target.

    Ties go to the lower number.
    """
    bins = len(goal)
    heap = [(-want, number) for number, want in enumerate(goal.tolist())]
    heapq.heapify(heap)
    members: list[list[int]] = [[] for _ in range(bins)]
    for index in np.argsort(-costs, kind="stable").tolist():
        want, number = heap[0]
        members[number].append(index)
        if len(members[number]) == count:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (want + int(costs[index]), number))
    return np.array(members, dtype=np.int64)
