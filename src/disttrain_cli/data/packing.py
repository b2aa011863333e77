"""Whole samples packed into sequences of fixed length; the sequences of all epochs are numbered in
one stream.

Which sample lies in which sequence is `data.epochs`' to say: equal on every machine. Sequence k of
the stream has the same samples whatever the layout; a global batch is a range of it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from disttrain_cli.data.epochs import NEWEST
from disttrain_cli.data.epochs.making import Epoch, Epochs
from disttrain_cli.data.epochs.sizes import joined, part_of
from disttrain_cli.data.index import Index
from disttrain_cli.data.once import Once
from disttrain_cli.data.slots import Ints
from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import Progress, silent

KEPT_EPOCHS = 2  # that stay open: a batch may lie on the end of one
AHEAD_SAMPLES = 1 << 20  # of an epoch, from which on the next one is made before it begins


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


def pack(
    index: Index,
    inputs: ModelInputs,
    seed: int,
    epoch: int,
    order: int = NEWEST,
    progress: Progress = silent,
) -> Packing:
    """All sequences of one epoch; their ids count from 0.

    Raises:
        DataError: the weights of the sources draw no sample, or too many.
        MismatchError: this program does not know the order.
    """
    assert inputs == index.inputs
    stream = SequenceStream(index, seed, order, progress)
    first, last = stream.range_of(epoch)
    packing = stream.batch(first, last - first)
    return replace(packing, ids=packing.ids - first)


class SequenceStream:
    """The endless stream of sequences: epoch 0, epoch 1, ... The only state is a cache; any thread
    may ask.

    Args:
        progress: told when the order of an epoch is made or waited for.
        keep: orders of earlier epochs, where more are made.

    Raises:
        MismatchError: this program does not know the order.
    """

    def __init__(
        self,
        index: Index,
        seed: int,
        order: int = NEWEST,
        progress: Progress = silent,
        keep: bool = False,
    ) -> None:
        self._index, self._epochs = index, Epochs(index, seed, order, progress, keep)
        # stream numbers of the first sequences of the epochs that are known, and of the next one
        self._firsts, self._lock = [0], threading.Lock()
        self._epoch = Once(self._known, KEPT_EPOCHS)
        self._ahead = 0  # the last epoch that was begun before it was asked for

    def batch(self, first: int, count: int) -> Packing:
        """Sequences first .. first + count - 1 of the stream, over the ends of epochs where need
        be."""
        parts, at = [], first
        while at < first + count:
            number = self.epoch_of(at)
            epoch = self._epoch(number)
            begin, end = epoch.firsts[number : number + 2]
            high = min(end, first + count)
            parts.append(part_of(epoch.columns, at - begin, high - begin))
            if high > (begin + end) // 2 and len(epoch.columns["samples"]) >= AHEAD_SAMPLES:
                self._begin(number + 1)
            at = high
        return _packing(self._index, first, joined(parts))

    def range_of(self, epoch: int) -> tuple[int, int]:
        """Numbers of the first sequence of an epoch, and of the one behind its last; its order is
        made where it is not there."""
        while len(self._firsts) < epoch + 2:
            self._epoch(len(self._firsts) - 1)
        self._epoch(epoch)
        return self._firsts[epoch], self._firsts[epoch + 1]

    def epoch_of(self, number: int) -> int:
        """The epoch of a sequence of the stream; its order is made where it is not there."""
        if self._firsts[-1] <= number:
            self._learn(self._epochs.firsts())
        while self._firsts[-1] <= number:
            self._epoch(len(self._firsts) - 1)
        epoch = bisect_right(self._firsts, number) - 1
        self._epoch(epoch)
        return epoch

    def _begin(self, number: int) -> None:
        """Have an epoch opened in the background; what fails is told to whoever asks for it."""
        if number > self._ahead:
            self._ahead = number
            threading.Thread(target=self._try, args=(number,), name="epoch", daemon=True).start()

    def _try(self, number: int) -> None:
        with suppress(Exception):
            self._epoch(number)

    def _known(self, number: int) -> Epoch:
        epoch = self._epochs.epoch(number, self._firsts)
        self._learn(epoch.firsts)
        return epoch

    def _learn(self, firsts: list[int]) -> None:
        with self._lock:  # else another thread may know more
            if len(firsts) > len(self._firsts):
                self._firsts = firsts


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
