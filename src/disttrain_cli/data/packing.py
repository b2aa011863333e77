"""Packs whole samples into sequences of fixed length, and numbers the sequences of all epochs in
one stream.

Samples are drawn in a shuffled order and put, block by block, the longest first, into the fullest
open sequence that still has room (best fit decreasing within a bounded window): O(n log n), equal
on every machine. Sequence k of the stream belongs to the same samples whatever the layout; a global
batch is a range of it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from disttrain_cli.data.arrays import mix, ranges, starts_of
from disttrain_cli.data.index import Index
from disttrain_cli.data.once import Once
from disttrain_cli.data.slots import Ints
from disttrain_cli.errors import DataError
from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.inputs import ModelInputs

BLOCK_SAMPLES = 2048  # samples that are sorted together
MOST_DRAWN = 20_000_000  # samples of an epoch, where there are not that many
OPEN_SEQUENCES = 512  # sequences kept open from block to block, those with the most room

KEPT_EPOCHS = 2  # whose sequences are remembered: a batch may lie on the end of one

# Purposes of `mix`, so that equal numbers used for different things give different hashes.
DRAW, ORDER, SEQUENCE_ORDER = 1, 2, 3


@dataclass(frozen=True)
class Members:
    """The items of one modality in packed sequences [Q]."""

    start: Ints  # [Q + 1]
    segment: Ints  # [N] segments of the index, in order of place
    grid: Ints  # [N, 2] rows, columns (`spec.heads.Head`)

    @property
    def counts(self) -> Ints:
        """[Q]"""
        return np.diff(self.start)

    @property
    def area(self) -> Ints:
        """[N] rows · columns."""
        return np.asarray(self.grid.prod(axis=1))

    def __len__(self) -> int:
        return len(self.segment)


@dataclass(frozen=True)
class Packing:
    """Packed sequences [Q] with what they hold; members of all sequences lie one after the
    other."""

    index: Index
    ids: Ints  # [Q] numbers in the stream of all epochs
    sample_start: Ints  # [Q + 1]
    samples: Ints  # rows of the index
    tokens: Ints  # [Q] without padding
    length_sq: Ints  # [Q] Σ length² over the samples inside
    label_tokens: Ints  # [Q]
    items: Mapping[Item, Members]  # of every modality

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def fill_fraction(self) -> float:
        """Tokens that are not padding, of all."""
        return float(self.tokens.sum()) / (len(self) * self.index.inputs.sequence_length)


def pack(index: Index, inputs: ModelInputs, seed: int, epoch: int) -> Packing:
    """All sequences of one epoch; their ids count from 0.

    Raises:
        DataError: the weights of the sources draw no sample.
    """
    assert inputs == index.inputs
    sample_start, samples = _pack_epoch(index, seed, epoch)
    return _describe(index, np.arange(len(sample_start) - 1, dtype=np.int64), sample_start, samples)


class SequenceStream:
    """The endless stream of sequences: epoch 0, epoch 1, ... The only state is a cache; any thread
    may ask."""

    def __init__(self, index: Index, seed: int) -> None:
        self._index = index
        self._first, self._lock = (
            [0],
            threading.Lock(),
        )  # stream number of the first sequence of each epoch known
        self._epoch = Once(lambda epoch: _pack_epoch(index, seed, epoch), KEPT_EPOCHS)

    def batch(self, first: int, count: int) -> Packing:
        """Sequences first .. first + count - 1 of the stream, over the ends of epochs where need
        be."""
        counts, samples = [], []
        at = first
        while at < first + count:
            epoch = self._epoch_of(at)
            start, rows = self._epoch(epoch)
            low = at - self._first[epoch]
            high = min(len(start) - 1, first + count - self._first[epoch])
            counts.append(np.diff(start[low : high + 1]))
            samples.append(rows[start[low] : start[high]])
            at = self._first[epoch] + high
        ids = np.arange(first, first + count, dtype=np.int64)
        return _describe(
            self._index, ids, starts_of(np.concatenate(counts)), np.concatenate(samples)
        )

    def _epoch_of(self, number: int) -> int:
        while self._first[-1] <= number:
            epoch = len(self._first) - 1
            start, _ = self._epoch(epoch)
            with self._lock:
                if epoch == len(self._first) - 1:  # else another thread was faster
                    self._first.append(self._first[epoch] + len(start) - 1)
        return bisect_left(self._first, number + 1) - 1


def _pack_epoch(index: Index, seed: int, epoch: int) -> tuple[Ints, Ints]:
    """(start [Q + 1], samples) of one epoch's sequences."""
    drawn = _draw(index, seed, epoch)
    bins = _fill(index.lengths[drawn].tolist(), index.inputs.sequence_length)
    order = np.argsort(mix(seed, epoch, SEQUENCE_ORDER, np.arange(len(bins))), kind="stable")
    members = [sorted(bins[number]) for number in order]
    start = starts_of(np.array([len(positions) for positions in members], dtype=np.int64))
    return start, drawn[
        np.array([position for positions in members for position in positions], dtype=np.int64)
    ]


def _draw(index: Index, seed: int, epoch: int) -> Ints:
    """Rows of an epoch in shuffled order: weight 2.5 draws every sample twice and half of them once
    more."""
    wanted = sum(
        weight * int((index.source == source).sum()) for source, weight in enumerate(index.weights)
    )
    most = max(MOST_DRAWN, 16 * len(index.source))
    if wanted > most:
        raise DataError(
            f"The weights of data.sources draw {wanted:,.0f} samples in an epoch",
            f"weights: {index.weights}, of {len(index.source):,} samples; allowed: {most:,}",
            "Lower all of them: the mixture follows from their ratios.",
        )
    rows, copies = [], []
    for source, weight in enumerate(index.weights):
        eligible = np.flatnonzero(
            index.source == source
            if index.drawn is None
            else (index.source == source) & index.drawn
        )
        again = round((weight - int(weight)) * len(eligible))
        by_chance = eligible[np.argsort(mix(seed, epoch, DRAW, eligible), kind="stable")[:again]]
        for copy, part in enumerate([*[eligible] * int(weight), by_chance]):
            rows.append(part)
            copies.append(np.full(len(part), copy, dtype=np.int64))
    drawn, copy_number = np.concatenate(rows), np.concatenate(copies)
    if not len(drawn):
        raise DataError(
            "The weights of data.sources draw no sample",
            f"weights: {index.weights}",
            "Raise the weight of at least one source, or lower data.held_out.",
        )
    return drawn[np.argsort(mix(seed, epoch, ORDER, drawn, copy_number), kind="stable")]


def _fill(lengths: list[int], capacity: int) -> list[list[int]]:
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


def _describe(index: Index, ids: Ints, sample_start: Ints, samples: Ints) -> Packing:
    """Everything an ordering needs of the given sequences."""
    lengths, labels = index.lengths[samples], index.label_tokens[samples]

    def per_sequence(values: Ints) -> Ints:
        total = starts_of(values)
        return total[sample_start[1:]] - total[sample_start[:-1]]

    counts = np.diff(index.segment_start)[samples]
    segments = ranges(index.segment_start[samples], counts)
    sequence = np.repeat(np.repeat(np.arange(len(ids)), np.diff(sample_start)), counts)
    chosen = {item: np.flatnonzero(index.kinds[segments] == kind) for item, kind in KINDS.items()}
    return Packing(
        index=index,
        ids=ids,
        sample_start=sample_start,
        samples=samples,
        tokens=per_sequence(lengths),
        length_sq=per_sequence(index.inputs.length_sq(lengths)),
        label_tokens=per_sequence(labels),
        items={
            item: Members(
                starts_of(np.bincount(sequence[areas], minlength=len(ids))),
                segments[areas],
                index.grids[segments[areas]],
            )
            for item, areas in chosen.items()
        },
    )
