"""The second order: samples in a drawn permutation, cut into blocks of millions, each packed at
once: best fit decreasing over how many samples have which length.

Samples of one length are alike, and so are sequences that are filled alike. What best fit does with
the samples one after the other, the longest first, it does here with all of a length and runs of
sequences: every step puts so many samples of a length into each sequence of a run. The result is
the same, sample for sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from disttrain_cli.data.arrays import mix, ranges, starts_of
from disttrain_cli.data.epochs.drawing import DRAW, ORDER, SEQUENCE_ORDER, check_drawn, eligible
from disttrain_cli.data.epochs.permutation import permuted
from disttrain_cli.data.index import Index
from disttrain_cli.data.slots import Ints

BLOCK_SAMPLES = 1 << 22
MOST_DRAWN = 200_000_000  # samples of an epoch, where there are not that many


def order_blocks(
    index: Index, seed: int, epoch: int, block_samples: int = BLOCK_SAMPLES
) -> Iterator[tuple[int, int, Ints, Ints]]:
    """(number of a block, of how many; start [Q + 1], samples) of one epoch's sequences.

    Raises:
        DataError: the weights of the sources draw no sample, or too many.
    """
    drawn = _drawn(index, seed, epoch)
    blocks = -(-len(drawn) // block_samples)
    for number in range(blocks):
        first, last = (at * len(drawn) // blocks for at in (number, number + 1))
        samples = drawn[permuted(first, last, len(drawn), seed, epoch, ORDER)]
        yield number, blocks, *pack_block(index, samples, seed, epoch, SEQUENCE_ORDER, number)


def pack_block(index: Index, samples: Ints, *key: int) -> tuple[Ints, Ints]:
    """(start [Q + 1], samples) of the sequences of a block, in an order drawn by `key`."""
    bins, places = fill(index.lengths[samples], index.inputs.sequence_length)
    order = np.argsort(mix(*key, np.arange(len(bins) - 1)), kind="stable")
    counts = np.diff(bins)[order]
    return starts_of(counts), samples[places[ranges(bins[order], counts)]]


def _drawn(index: Index, seed: int, epoch: int) -> Ints:
    """Rows of an epoch: weight 2.5 draws every sample twice and half of them once more."""
    check_drawn(index, MOST_DRAWN)
    kind = np.int32 if len(index.source) < 1 << 31 else np.int64
    parts = []
    for source, weight in enumerate(index.weights):
        own = places_of(eligible(index, source), kind)
        again = round((weight - int(weight)) * len(own))
        parts += [own] * int(weight)
        parts.append(own[permuted(0, again, len(own), seed, epoch, DRAW, source)])
    return np.concatenate(parts)


def places_of(chosen: NDArray[np.bool_], kind: DTypeLike) -> NDArray[Any]:
    """Where `chosen` is true: `np.flatnonzero`, but as narrow as may be."""
    return np.concatenate(
        [
            (first + np.flatnonzero(chosen[first : first + BLOCK_SAMPLES])).astype(kind)
            for first in range(0, len(chosen), BLOCK_SAMPLES)
        ]
    )


class _Run(NamedTuple):
    """Sequences that are filled alike; ordered by room, then by number."""

    room: int  # tokens free in each
    first: int
    sequences: int
    held: int  # samples in each


def fill(lengths: Ints, capacity: int) -> tuple[Ints, Ints]:
    """(start [Q + 1], places): the places of `lengths` by sequence, the longest first in each; the
    sum of none exceeds `capacity`."""
    by_length = _stable_order(capacity - np.asarray(lengths, dtype=np.int64))
    steps, sequences = _steps(np.bincount(lengths), capacity)
    first, count, held, each = np.array(steps, dtype=np.int64).T
    # one row for each sequence of a step
    sequence, each = ranges(first, count), np.repeat(each, count)
    totals = np.bincount(sequence, weights=each, minlength=sequences).astype(np.int64)
    start = starts_of(totals)
    places = np.empty_like(by_length)
    places[ranges(start[sequence] + np.repeat(held, count), each)] = by_length
    return start, places


def _steps(histogram: Ints, capacity: int) -> tuple[list[tuple[int, int, int, int]], int]:
    """(steps, number of sequences); a step is (first sequence, sequences, samples that each holds,
    samples that each is given), and takes the longest samples that are left."""
    steps, runs, sequences = list[tuple[int, int, int, int]](), list[_Run](), 0
    lengths = np.flatnonzero(histogram)
    shortest = int(lengths[0])
    for length in lengths[::-1].tolist():
        left = int(histogram[length])
        while left:
            at = bisect_left(runs, (length,))
            if at < len(runs):
                run = runs.pop(at)
            else:
                run = _Run(capacity, sequences, -(-left // (capacity // length)), 0)
                sequences += run.sequences
            each = min(left, run.room // length)
            count = min(run.sequences, left // each)
            steps.append((run.first, count, run.held, each))
            left -= count * each
            given = _Run(run.room - each * length, run.first, count, run.held + each)
            rest = run._replace(first=run.first + count, sequences=run.sequences - count)
            for one in (given, rest):
                if one.sequences and one.room >= shortest:
                    insort(runs, one)
    return steps, sequences


def _stable_order(values: Ints) -> Ints:
    """Places of `values` from the least on, equal ones as they were: NumPy sorts 16 bits in linear
    time."""
    order = np.argsort((values & 0xFFFF).astype(np.uint16), kind="stable")
    if values.max(initial=0) > 0xFFFF:
        order = order[np.argsort((values[order] >> 16).astype(np.uint16), kind="stable")]
    return order
