"""The endless stream of sequences of one phase: epoch 0, epoch 1, ...

Its only state is a cache; it is thread-safe.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.epochs.sizes import part_of
from disttrain_cli.data.epochs.streams import Start, start_after
from disttrain_cli.data.once import Once

if TYPE_CHECKING:
    from disttrain_cli.data.epochs.making import Epoch, Epochs

KEPT_EPOCHS = 2  # epochs that stay open: a batch may span the end of one
AHEAD_SAMPLES = 1 << 20  # of an epoch; from this size on, the next one is computed ahead


class PhaseStream:
    """Sequences of a phase, numbered from 0.

    Args:
        sequences: number of the phase's sequences before the next one begins; None = it is the
            last.
        following: the next phase.
    """

    def __init__(
        self, epochs: Epochs, sequences: int | None = None, following: PhaseStream | None = None
    ) -> None:
        self._epochs, self._sequences, self._following = epochs, sequences, following
        # numbers of the first sequences of the known epochs, and of the next one
        self._firsts, self._lock = [0], threading.Lock()
        self._epoch = Once(self._known, KEPT_EPOCHS)
        self._ahead = 0  # 1 + the last epoch that was computed ahead

    def parts(self, first: int, count: int) -> list[dict[str, NDArray[np.int64]]]:
        """Return the columns of sequences first .. first + count - 1, by epoch.

        The columns are those of `data.epochs.sizes`.
        """
        parts, at = [], first
        while at < first + count:
            number = self.epoch_of(at)
            epoch = self._epoch(number)
            begin, end = epoch.firsts[number : number + 2]
            high = min(end, first + count)
            parts.append(part_of(epoch.columns, at - begin, high - begin))
            if len(epoch.columns["samples"]) >= AHEAD_SAMPLES:
                self._look_ahead(number, begin, end, high)
            at = high
        return parts

    def range_of(self, epoch: int) -> tuple[int, int]:
        """Return the numbers of an epoch's first sequence and of the one after its last.

        The epoch's order is computed if it does not exist.
        """
        while len(self._firsts) < epoch + 2:
            self._epoch(len(self._firsts) - 1)
        self._epoch(epoch)
        return self._firsts[epoch], self._firsts[epoch + 1]

    def epoch_of(self, number: int) -> int:
        """Return the epoch of a sequence; its order is computed if it does not exist."""
        if self._firsts[-1] <= number:
            self._learn(self._epochs.firsts())
        while self._firsts[-1] <= number:
            self._epoch(len(self._firsts) - 1)
        epoch = bisect_right(self._firsts, number) - 1
        self._epoch(epoch)
        return epoch

    def after(self, start: Start, used: int) -> Start:
        """Return the initial state of the next phase.

        Args:
            start: the initial state of this phase.
            used: sequences of this phase before the next one.
        """
        number = self.epoch_of(used - 1)
        epoch, (begin, end) = self._epoch(number), self.range_of(number)
        block = bisect_right(epoch.blocks, used - 1 - begin) - 1
        block_end = [*epoch.blocks, end - begin][block + 1]
        left = part_of(epoch.columns, used - begin, block_end)["samples"]
        mixture, phase = self._epochs.mixture, self._epochs.phase
        return start_after(mixture, phase, start, number, block, left)

    def leave(self) -> None:
        """Remove the orders that are not needed once this phase is over."""
        if self._sequences is not None:
            self._epochs.leave(self._sequences)

    def _look_ahead(self, number: int, begin: int, end: int, high: int) -> None:
        """Start to compute the next epoch in the background once half of this one is used."""
        if self._sequences is None or end < self._sequences:
            if high > (begin + end) // 2:
                self._begin(number + 1)
        elif self._following is not None and high > (begin + self._sequences) // 2:
            self._following._begin(0)

    def _begin(self, number: int) -> None:
        """Open an epoch in the background; an error is raised when the epoch is requested."""
        with self._lock:
            if number < self._ahead:
                return
            self._ahead = number + 1
        threading.Thread(target=self._try, args=(number,), name="epoch", daemon=True).start()

    def _try(self, number: int) -> None:
        with suppress(Exception):
            self._epoch(number)

    def _known(self, number: int) -> Epoch:
        epoch = self._epochs.epoch(number, self._firsts)
        self._learn(epoch.firsts)
        return epoch

    def _learn(self, firsts: list[int]) -> None:
        with self._lock:  # another thread may have learnt more
            if len(firsts) > len(self._firsts):
                self._firsts = firsts
