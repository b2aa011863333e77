"""Best-fit-decreasing packing of a block of millions of samples, by the histogram of lengths.

Samples of one length are interchangeable, and so are sequences with equal free room. Best fit takes
samples one after the other, the longest first; here all samples of a length are placed at once into
runs of sequences: every step puts the same number of samples of a length into each sequence of a
run. The result is the same, sample for sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from disttrain_cli.data.arrays import mix, ranges, starts_of
from disttrain_cli.data.slots import Ints

if TYPE_CHECKING:
    from disttrain_cli.data.index.sample_index import Index


def pack_block(index: Index, samples: Ints, *key: int) -> tuple[Ints, Ints]:
    """Return (start [Q + 1], samples) of the sequences of a block, in an order drawn by `key`."""
    bins, places = fill(index.lengths[samples], index.inputs.sequence_length)
    order = np.argsort(mix(*key, np.arange(len(bins) - 1)), kind="stable")
    counts = np.diff(bins)[order]
    return starts_of(counts), samples[places[ranges(bins[order], counts)]]


class _Run(NamedTuple):
    """Consecutive sequences with samples of the same lengths; ordered by room, then by number."""

    room: int  # free tokens in each
    first: int
    sequences: int
    held: int  # samples in each


def fill(lengths: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Pack lengths into sequences of at most `capacity` tokens, the longest first in each.

    Returns:
        (start [Q + 1], indices into `lengths` by sequence).
    """
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
    """Return (steps, number of sequences).

    A step is (first sequence, sequences, samples that each holds, samples added to each), and takes
    the longest remaining samples.
    """
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
    """Return the indices that sort `values` stably; NumPy sorts 16 bits in linear time."""
    order = np.argsort((values & 0xFFFF).astype(np.uint16), kind="stable")
    if values.max(initial=0) > 0xFFFF:
        order = order[np.argsort((values[order] >> 16).astype(np.uint16), kind="stable")]
    return order
