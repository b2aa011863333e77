"""The orders of all epochs, each made once: by the first process that asks, for all of them.

They lie in the run's folder as flat files (`data.columns`), `orders/WHAT-FOR/epoch-000000/`. Each
says which number in the stream of all epochs the first sequence of its epoch has, and of those
before it: an epoch can be opened where earlier ones are gone. An order that is cut off or of
something else is made anew. Of an index that has no folder, orders are kept in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from disttrain_cli.data.columns import Columns, alone, open_columns, writing_columns
from disttrain_cli.data.epochs import HISTOGRAM, NEWEST, WINDOWS, histogram, windows
from disttrain_cli.data.epochs.sizes import START, columns_of, joined
from disttrain_cli.data.index import Index
from disttrain_cli.data.slots import Ints
from disttrain_cli.errors import MismatchError
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.progress import Progress, silent

NAME = "epoch-{:06d}"
KEPT = 3  # epochs on disk: one that is made ahead, this one, and the one before it


@dataclass(frozen=True)
class Epoch:
    """The sequences [Q] of one epoch."""

    #: numbers in the stream of the first sequence of every epoch up to this one, and of the next
    firsts: list[int]
    columns: Columns  # `data.epochs.sizes`


class Epochs:
    """The epochs of one index and seed; any thread and process may ask.

    Raises:
        MismatchError: `order` is none of this program's.
    """

    def __init__(
        self,
        index: Index,
        seed: int,
        order: int = NEWEST,
        progress: Progress = silent,
        keep: bool = False,
    ) -> None:
        """`keep`: earlier epochs, which are removed else when one is made."""
        if order not in (WINDOWS, HISTOGRAM):
            raise MismatchError(
                f"The run has its data in order {order}",
                f"this program knows {WINDOWS} and {HISTOGRAM}",
                "Go on with the disttrain that it began with.",
            )
        self._index, self._seed, self._order, self._progress = index, seed, order, progress
        self._keep = keep
        self._made_for = {
            "index": index.fingerprint,
            "held out": index.held,
            "inputs": index.inputs.fingerprint(),
            "seed": seed,
            "order": order,
        }
        root = index.orders
        self._folder = root and root / fingerprint(self._made_for)

    def firsts(self) -> list[int]:
        """Numbers of first sequences, as `Epoch.firsts`, of the last epoch that is made."""
        if self._folder is not None:
            for folder in sorted(self._folder.glob(NAME.format(0)[:-6] + "*"), reverse=True):
                if (epoch := self._opened(folder)) is not None:
                    return epoch.firsts
        return [0]

    def epoch(self, number: int, firsts: list[int]) -> Epoch:
        """An epoch, made where it is not there yet.

        Args:
            firsts: of all epochs before it, and of itself.

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

    def _opened(self, folder: Path) -> Epoch | None:
        opened = open_columns(folder)
        if opened is None or opened[0].get("made for") != self._for(folder):
            return None
        header, columns = opened
        return Epoch(header["firsts"], columns)

    def _for(self, folder: Path) -> dict[str, Any]:
        return self._made_for | {"epoch": folder.name}

    def _write(self, folder: Path, number: int, firsts: list[int]) -> None:
        sequences = 0
        with writing_columns(folder) as writer:
            for columns in self._pieces(number):
                sequences += len(columns["tokens"])
                for name, piece in columns.items():
                    (writer.add_starts if name.endswith(START) else writer.add)(name, piece)
            firsts = [*firsts[: number + 1], firsts[number] + sequences]
            writer.close({"made for": self._for(folder), "firsts": firsts})

    def _in_memory(self, number: int, firsts: list[int]) -> Epoch:
        columns = joined(list(self._pieces(number)))
        firsts = [*firsts[: number + 1], firsts[number] + len(columns["tokens"])]
        return Epoch(firsts, columns)

    def _pieces(self, number: int) -> Iterator[dict[str, NDArray[Any]]]:
        """Columns of the sequences of one block after the other."""
        for block, blocks, start, samples in self._blocks(number):
            self._progress(f"order of epoch {number}", block, blocks)
            yield columns_of(self._index, start, samples)

    def _blocks(self, number: int) -> Iterator[tuple[int, int, Ints, Ints]]:
        if self._order == WINDOWS:
            yield 0, 1, *windows.order_epoch(self._index, self._seed, number)
        else:
            yield from histogram.order_blocks(self._index, self._seed, number)


def _remove_before(root: Path, epoch: int) -> None:
    for number in range(epoch - 1, -1, -1):
        if not (old := root / NAME.format(number)).exists():
            return
        shutil.rmtree(old, ignore_errors=True)
