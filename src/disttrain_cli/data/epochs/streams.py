"""Streams of samples, from which the phases of a mixture draw.

Every source is an endless stream of its samples, one permutation of them after another. A phase
draws from all streams by its weights, in blocks of millions that are packed by best fit
(`best_fit`), and continues where the phase before it stopped. Samples that a phase had drawn into
sequences that were not used come first in the next one: whatever the phases, no sample of a stream
is left out and none is drawn twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import mix
from disttrain_cli.data.epochs.best_fit import pack_block
from disttrain_cli.data.epochs.permutation import permuted
from disttrain_cli.data.slots import Ints
from disttrain_cli.errors import DataError

if TYPE_CHECKING:
    from disttrain_cli.data.epochs.mixture import Mixture
    from disttrain_cli.data.index.sample_index import Index

BLOCK_SAMPLES = 1 << 22
MOST_DRAWN = 200_000_000  # samples of an epoch, or 16 times the index's samples if that is more
SMALL = 1 << 12  # up to this many samples of a source, many permutations are sorted at once
DRAW, ORDER = 1, 2  # purposes of `mix`, so that equal keys of different purposes hash differently


class Start(NamedTuple):
    """Initial state of a phase, by source."""

    drawn: list[int]  # samples drawn from its stream before the phase
    pending: list[Ints]  # rows of drawn samples that no sequence before the phase contains


def at_first(mixture: Mixture) -> Start:
    """Return the initial state of the first phase."""
    sources = range(len(mixture.index.weights))
    return Start([0 for _ in sources], [np.zeros(0, np.int64) for _ in sources])


def _eligible(index: Index, source: int) -> NDArray[np.bool_]:
    """Return a mask [N] of the samples of a source that are packed into sequences."""
    own, chosen = index.source == source, index.chosen
    return own if chosen is None else own & chosen


def _rows_of(index: Index, source: int) -> NDArray[Any]:
    """Return the rows of these samples, in the narrowest type."""
    own = _eligible(index, source)
    kind = np.int32 if len(own) < 1 << 31 else np.int64
    return np.concatenate(
        [
            (first + np.flatnonzero(own[first : first + BLOCK_SAMPLES])).astype(kind)
            for first in range(0, len(own), BLOCK_SAMPLES)
        ]
    )


class Draws:
    """Number of samples that a phase draws of each source into each block of each epoch.

    An epoch draws every source as often as its weight states, exactly so in the mean over epochs.
    """

    def __init__(self, mixture: Mixture, phase: int) -> None:
        index, weights = mixture.index, mixture.phases[phase].weights
        self._index = index
        self.counts = [int(_eligible(index, at).sum()) for at in range(len(index.weights))]
        self._each = [
            Fraction(weight) * count for weight, count in zip(weights, self.counts, strict=False)
        ]
        self._each += [Fraction(0)] * (len(self.counts) - len(self._each))

    def of_epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Return, by source, the samples drawn by the phase at the start and end of an epoch.

        Raises:
            DataError: no source has a sample drawn in every epoch, or too many are drawn.
        """
        if max(self._each, default=Fraction(0)) < 1:
            raise DataError(
                "The weights of data.sources draw no sample, or none in some epochs",
                f"samples of the sources: {self.counts}",
                "Raise the weight of at least one source, or lower data.held_out.",
            )
        ends = [
            (int(each * epoch + Fraction(1, 2)), int(each * (epoch + 1) + Fraction(1, 2)))
            for each in self._each
        ]
        total = sum(end - begin for begin, end in ends)
        samples = len(self._index.source)
        if total > (most := max(MOST_DRAWN, 16 * samples)):
            raise DataError(
                f"The weights of data.sources draw {total:,} samples in an epoch",
                f"samples: {samples:,}; allowed: {most:,}",
                "Lower all of them: the mixture follows from their ratios.",
            )
        return ends

    def of_blocks(self, epoch: int) -> list[list[tuple[int, int]]]:
        """Return the numbers of `of_epoch` for every block of an epoch."""
        ends = self.of_epoch(epoch)
        blocks = -(-sum(end - begin for begin, end in ends) // BLOCK_SAMPLES)
        edges = [
            [begin + (end - begin) * block // blocks for begin, end in ends]
            for block in range(blocks + 1)
        ]
        return [list(zip(*both, strict=True)) for both in pairwise(edges)]


def order_blocks(
    mixture: Mixture, phase: int, start: Start, epoch: int
) -> Iterator[tuple[int, int, Ints, Ints]]:
    """Yield the blocks of an epoch of a phase.

    A block is (its number, number of blocks, start [Q + 1], samples) of its sequences.

    Raises:
        DataError: the weights of the sources draw no sample, or too many.
    """
    index, seed = mixture.index, mixture.seed
    blocks = Draws(mixture, phase).of_blocks(epoch)
    drawing = [at for at, (begin, _) in enumerate(blocks[0]) if blocks[-1][at][1] > begin]
    own = {at: _rows_of(index, at) for at in drawing}
    for number, ends in enumerate(blocks):
        samples = np.concatenate(
            [
                _queued(start.drawn[at], start.pending[at], own[at], *ends[at], seed, at)
                for at in drawing
            ]
        )
        key = seed, phase, epoch, number
        samples = samples[permuted(0, len(samples), len(samples), *key, ORDER)]
        yield number, len(blocks), *pack_block(index, samples, *key)


def _queued(
    drawn: int, pending: Ints, own: Ints, first: int, last: int, seed: int, source: int
) -> Ints:
    """Return the rows that a phase draws from a source as its samples `first` to before `last`."""
    begin, end = (drawn + max(0, at - len(pending)) for at in (first, last))
    return np.concatenate(
        [pending[first:last].astype(own.dtype), own[_stream(begin, end, len(own), seed, source)]]
    )


def _stream(first: int, last: int, count: int, seed: int, source: int) -> Ints:
    """Return the samples `first` to before `last` of a source's stream, by number in the source.

    Args:
        count: number of the source's samples.
    """
    turns = np.arange(first // count, -(-last // count))
    if count <= SMALL:
        by = mix(seed, DRAW, source, turns[:, None], np.arange(count))
        begin = first - first // count * count
        return np.argsort(by, axis=1, kind="stable").ravel()[begin : begin + last - first]
    parts = [np.zeros(0, np.int64)]
    for turn in turns.tolist():
        begin, end = (min(max(at - turn * count, 0), count) for at in (first, last))
        parts.append(permuted(begin, end, count, seed, DRAW, source, turn))
    return np.concatenate(parts)


def start_after(
    mixture: Mixture, phase: int, start: Start, epoch: int, block: int, left: Ints
) -> Start:
    """Return the initial state of the next phase.

    Args:
        epoch, block: of the last sequence before it.
        left: rows of the samples in later sequences of this block.
    """
    after = Start([], [])
    sources = mixture.index.source[left]
    for source, (_, end) in enumerate(Draws(mixture, phase).of_blocks(epoch)[block]):
        pending = start.pending[source]
        after.drawn.append(start.drawn[source] + max(0, end - len(pending)))
        after.pending.append(np.concatenate([left[sources == source], pending[end:]]))
    return after
