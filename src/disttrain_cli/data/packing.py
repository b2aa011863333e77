"""Packed sequences: complete samples packed to fixed length, and the stream of all sequences.

The sequences of all phases and epochs are numbered in one stream. `data.epochs` determines the
samples of each sequence, equally on every machine. Sequence k of the stream has the same samples
for every layout; a global batch is a range of the stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from disttrain_cli.data.epochs.making import Epochs, remove_others
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.epochs.phase import PhaseStream
from disttrain_cli.data.epochs.sizes import joined
from disttrain_cli.data.epochs.streams import Start, at_first
from disttrain_cli.data.once import Once
from disttrain_cli.data.slots import Ints
from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from disttrain_cli.data.index.sample_index import Index


@dataclass(frozen=True)
class Members:
    """Items of one modality in packed sequences [Q]."""

    start: Ints  # [Q + 1]
    segment: Ints  # [N] segments of the index, in the order of the sequences
    grid: Ints  # [N, 2] rows, columns (`spec.heads.Head`)

    @property
    def counts(self) -> Ints:
        """[Q] items of each sequence."""
        return np.diff(self.start)

    @property
    def area(self) -> Ints:
        """[N] rows · columns."""
        return np.asarray(self.grid.prod(axis=1))

    def __len__(self) -> int:
        return len(self.segment)


@dataclass(frozen=True)
class Packing:
    """Packed sequences [Q] and their contents, concatenated over all sequences."""

    index: Index
    ids: Ints  # [Q] numbers in the stream of all sequences
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
        """Share of tokens that are not padding."""
        return float(self.tokens.sum()) / (len(self) * self.index.inputs.sequence_length)


def pack(mixture: Mixture, epoch: int, progress: Progress = silent) -> Packing:
    """Return all sequences of one epoch of a mixture's first phase; their ids count from 0.

    Raises:
        DataError: the weights of the sources draw no sample, or too many.
        MismatchError: this version does not support the mixture's order.
    """
    stream = SequenceStream(replace(mixture, phases=mixture.phases[:1]), progress)
    first, last = stream.range_of(0, epoch)
    packing = stream.batch(first, last - first)
    return replace(packing, ids=packing.ids - first)


class SequenceStream:
    """The endless stream of sequences: phase after phase, epoch after epoch; thread-safe.

    Args:
        progress: reports when the order of an epoch is computed or waited for.
        keep: True = orders of earlier epochs stay on disk when more are computed.

    Raises:
        MismatchError: this version does not support the mixture's order.
    """

    def __init__(self, mixture: Mixture, progress: Progress = silent, keep: bool = False) -> None:
        self._mixture, self._firsts = mixture, [phase.first for phase in mixture.phases]
        self._start = Once(self._started, len(self._firsts))
        self._phases: list[PhaseStream] = []
        following, end = None, None
        for number, first in reversed(list(enumerate(self._firsts))):
            epochs = Epochs(mixture, number, partial(self._start, number), progress, keep)
            following = PhaseStream(epochs, None if end is None else end - first, following)
            self._phases.insert(0, following)
            end = first

    def batch(self, first: int, count: int) -> Packing:
        """Return sequences first .. first + count - 1 of the stream.

        They may span epochs and phases.
        """
        parts, at = [], first
        while at < first + count:
            phase = self._phase_of(at)
            high = self._within(phase, first + count)
            parts += self._phases[phase].parts(at - self._firsts[phase], high - at)
            at = high
        return _packing(self._mixture.index, first, joined(parts))

    def range_of(self, phase: int, epoch: int) -> tuple[int, int]:
        """Return the numbers of an epoch's first sequence and of the one after its last.

        The latter may be the next phase's first. The epoch's order is computed if it does not
        exist.
        """
        begin, end = (self._firsts[phase] + at for at in self._phases[phase].range_of(epoch))
        return begin, self._within(phase, end)

    def epoch_of(self, number: int) -> tuple[int, int]:
        """Return the phase, and the epoch in it, of a sequence of the stream.

        The epoch's order is computed if it does not exist.
        """
        phase = self._phase_of(number)
        return phase, self._phases[phase].epoch_of(number - self._firsts[phase])

    def remove_unneeded(self, at: int, kept: Sequence[Mixture]) -> None:
        """Remove orders on disk that are not needed to resume from a sequence.

        They are those of other mixtures than this one and `kept` and, of past phases, all epochs
        but the last. An order that is needed nevertheless is computed again.
        """
        for phase in self._phases[: self._phase_of(at)]:
            phase.leave()
        if (root := self._mixture.index.orders) is not None:
            remove_others(root, [self._mixture, *kept])

    def _within(self, phase: int, end: int) -> int:
        return min([end, *self._firsts[phase + 1 : phase + 2]])

    def _phase_of(self, number: int) -> int:
        return bisect_right(self._firsts, number) - 1

    def _started(self, phase: int) -> Start:
        """Return the initial state of a phase."""
        if not phase:
            return at_first(self._mixture)
        before, used = phase - 1, self._firsts[phase] - self._firsts[phase - 1]
        return self._phases[before].after(self._start(before), used)


def _packing(index: Index, first: int, columns: Mapping[str, Ints]) -> Packing:
    return Packing(
        index=index,
        ids=first + np.arange(len(columns["tokens"]), dtype=np.int64),
        items={
            item: Members(*(columns[f"{item}.{name}"] for name in ("start", "segment", "grid")))
            for item in KINDS
        },
        **{
            name: columns[name]
            for name in ("sample_start", "samples", "tokens", "length_sq", "label_tokens")
        },
    )
