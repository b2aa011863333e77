"""Orders of all epochs of a phase, each computed once, by the first process that needs it.

They lie in the run's folder as flat files (`data.columns`), `orders/FINGERPRINT/epoch-000000/`.
Each stores the number in the phase of its epoch's first sequence, and of those of all earlier
epochs, so an epoch can be opened after earlier ones are removed. An order that is truncated or has
other inputs is computed again. For an index without a folder, orders are kept in memory.
"""

from __future__ import annotations

import fcntl
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import starts_of
from disttrain_cli.data.columns import Columns, alone, open_columns, writing_columns
from disttrain_cli.data.epochs import streams
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.epochs.sizes import START, columns_of, joined
from disttrain_cli.data.epochs.streams import Start
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.progress import Progress

NAME, EPOCHS = "epoch-{:06d}", "epoch-*"
KEPT = 3  # epochs on disk: the next, which is computed ahead, this one, and the one before it


@dataclass(frozen=True)
class Epoch:
    """Sequences [Q] of one epoch."""

    #: numbers in the phase of the first sequence of every epoch up to this one, and of the next
    firsts: list[int]
    blocks: list[int]  # numbers in the epoch of the first sequence of every block
    columns: Columns  # `data.epochs.sizes`


class Epochs:
    """Epochs of a phase of a mixture; safe for use by several threads and processes."""

    def __init__(
        self,
        mixture: Mixture,
        phase: int,
        start: Callable[[], Start],
        progress: Progress,
        keep: bool,
    ) -> None:
        """
        Args:
            start: returns the initial state of the phase; called when an epoch is computed.
            keep: True = earlier epochs stay on disk when another is computed.
        """
        self.mixture, self.phase = mixture, phase
        self._start, self._progress, self._keep = start, progress, keep
        self._made_for, self._folder = _made_for(mixture, phase), folder_of(mixture, phase)

    def firsts(self) -> list[int]:
        """Return numbers of first sequences, as `Epoch.firsts`, of the last epoch on disk."""
        if self._folder is not None:
            for folder in sorted(self._folder.glob(EPOCHS), reverse=True):
                if (epoch := self._opened(folder)) is not None:
                    return epoch.firsts
        return [0]

    def epoch(self, number: int, firsts: list[int]) -> Epoch:
        """Return an epoch, computed if it does not exist.

        Args:
            firsts: `Epoch.firsts` of all epochs before it, and of itself.

        Raises:
            DataError: the weights of the sources draw no sample, or too many.
            SpecError: it cannot be written (missing permission, disk full).
        """
        if self._folder is None:
            return self._in_memory(number, firsts)
        folder = self._folder / NAME.format(number)
        if (there := self._opened(folder)) is not None:
            return there
        with alone(self._folder / "lock", f"the order of epoch {number}", self._progress):
            if (there := self._opened(folder)) is None:
                self._write(folder, number, firsts)
                there = self._opened(folder)
                if not self._keep:
                    _remove_before(self._folder, number + 1 - KEPT)
        assert there is not None
        return there

    def leave(self, used: int) -> None:
        """Remove all epochs on disk except that of sequence `used - 1`.

        The next phase begins with that epoch's remaining samples.
        """
        firsts = self.firsts()
        if self._folder is None or used > firsts[-1]:
            return
        last = NAME.format(bisect_right(firsts, used - 1) - 1)
        for folder in self._folder.glob(EPOCHS):
            if folder.name != last:
                shutil.rmtree(folder, ignore_errors=True)

    def _opened(self, folder: Path) -> Epoch | None:
        opened = open_columns(folder)
        if opened is None or opened[0].get("made for") != self._for(folder):
            return None
        header, columns = opened
        return Epoch(header["firsts"], header.get("blocks", [0]), columns)

    def _for(self, folder: Path) -> dict[str, Any]:
        return self._made_for | {"epoch": folder.name}

    def _write(self, folder: Path, number: int, firsts: list[int]) -> None:
        blocks, sequences = list[int](), 0
        with writing_columns(folder) as writer:
            for columns in self._pieces(number):
                blocks.append(sequences)
                sequences += len(columns["tokens"])
                for name, piece in columns.items():
                    (writer.add_starts if name.endswith(START) else writer.add)(name, piece)
            firsts = [*firsts[: number + 1], firsts[number] + sequences]
            made_for = {"made for": self._for(folder)}
            writer.close({**made_for, "firsts": firsts, "blocks": blocks})

    def _in_memory(self, number: int, firsts: list[int]) -> Epoch:
        pieces = list(self._pieces(number))
        blocks = starts_of(np.array([len(piece["tokens"]) for piece in pieces])).tolist()
        firsts = [*firsts[: number + 1], firsts[number] + blocks.pop()]
        return Epoch(firsts, blocks, joined(pieces))

    def _pieces(self, number: int) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the columns of the sequences of each block."""
        for block, blocks, start, samples in streams.order_blocks(
            self.mixture, self.phase, self._start(), number
        ):
            self._progress(f"order of epoch {number}", block, blocks)
            yield columns_of(self.mixture.index, start, samples)


def _made_for(mixture: Mixture, phase: int) -> dict[str, Any]:
    """Return the inputs of an order."""
    index = mixture.index
    phases = mixture.phases[: phase + 1]  # sources of later phases change nothing
    own = index.of_sources[: max(len(one.weights) for one in phases)]
    if any(shard.held_out for shard in index.shards):
        own = []  # `of_sources` leaves out held-out shards, whose rows lie between those of sources
    return {
        "index": own or index.fingerprint,
        "held out": index.held,
        "inputs": index.inputs.fingerprint(),
        "seed": mixture.seed,
        "phases": [[one.first, list(one.weights)] for one in phases],
    }


def folder_of(mixture: Mixture, phase: int) -> Path | None:
    """Return the folder of a phase's orders; None if they are kept in memory."""
    root = mixture.index.orders
    return root and root / fingerprint(_made_for(mixture, phase))


def remove_others(root: Path, needed: Sequence[Mixture]) -> None:
    """Remove the orders in a folder that none of these mixtures needs and no process computes."""
    kept = {folder_of(one, phase) for one in needed for phase in range(len(one.phases))}
    for folder in set(root.iterdir()) - kept if root.is_dir() else ():
        with suppress(OSError), (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


def _remove_before(root: Path, epoch: int) -> None:
    for number in range(epoch - 1, -1, -1):
        if not (old := root / NAME.format(number)).exists():
            return
        shutil.rmtree(old, ignore_errors=True)
