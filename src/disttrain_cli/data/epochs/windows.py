"""The first order: samples are drawn in a shuffled order and put, block by block, the longest
first, into the fullest open sequence that still has room (best fit decreasing within a bounded
window)."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from disttrain_cli.data.arrays import mix, starts_of
from disttrain_cli.data.epochs.drawing import DRAW, ORDER, SEQUENCE_ORDER, check_drawn, eligible
from disttrain_cli.data.index import Index
from disttrain_cli.data.slots import Ints

BLOCK_SAMPLES = 2048  # samples that are sorted together
MOST_DRAWN = 20_000_000  # samples of an epoch, where there are not that many
OPEN_SEQUENCES = 512  # sequences kept open from block to block, those with the most room


def order_epoch(index: Index, seed: int, epoch: int) -> tuple[Ints, Ints]:
    """(start [Q + 1], samples) of one epoch's sequences.

    Raises:
        DataError: the weights of the sources draw no sample, or too many.
    """
    drawn = _draw(index, seed, epoch)
    bins = fill(index.lengths[drawn].tolist(), index.inputs.sequence_length)
    order = np.argsort(mix(seed, epoch, SEQUENCE_ORDER, np.arange(len(bins))), kind="stable")
    members = [sorted(bins[number]) for number in order]
    start = starts_of(np.array([len(positions) for positions in members], dtype=np.int64))
    return start, drawn[
        np.array([position for positions in members for position in positions], dtype=np.int64)
    ]


def _draw(index: Index, seed: int, epoch: int) -> Ints:
    """Rows of an epoch in shuffled order: weight 2.5 draws every sample twice and half of them once
    more."""
    check_drawn(index, MOST_DRAWN)
    rows, copies = [], []
    for source, weight in enumerate(index.weights):
        own = np.flatnonzero(eligible(index, source))
        again = round((weight - int(weight)) * len(own))
        by_chance = own[np.argsort(mix(seed, epoch, DRAW, own), kind="stable")[:again]]
        for copy, part in enumerate([*[own] * int(weight), by_chance]):
            rows.append(part)
            copies.append(np.full(len(part), copy, dtype=np.int64))
    drawn, copy_number = np.concatenate(rows), np.concatenate(copies)
    return drawn[np.argsort(mix(seed, epoch, ORDER, drawn, copy_number), kind="stable")]


def fill(lengths: list[int], capacity: int) -> list[list[int]]:
    """Places of `lengths` by sequence; none exceeds `capacity`."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # open sequences as (tokens free, number), sorted
    shortest = min(lengths)
    for first in range(0, len(lengths), BLOCK_SAMPLES):
        block = range(first, min(first + BLOCK_SAMPLES, len(lengths)))
        for index in sorted(block, key=lambda i: (-lengths[i], i)):
            length = lengths[index]
            at = bisect_left(room, (length, -1))
            if at < len(room):
                free, number = room.pop(at)
                bins[number].append(index)
            else:
                free, number = capacity, len(bins)
                bins.append([index])
            if free - length >= shortest:
                insort(room, (free - length, number))
        del room[:-OPEN_SEQUENCES]
    return bins
