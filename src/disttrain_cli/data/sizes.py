"""Sizes of packed sequences as flat arrays: all the data that orderings and simulations need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import mix, ranges, starts_of
from disttrain_cli.data.slots import Ints, columns
from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import SizeSample

if TYPE_CHECKING:
    from disttrain_cli.data.packing import Packing

SAMPLED_BATCH = 4  # purpose of `mix`, distinct from those of packing


@dataclass(frozen=True)
class ItemAreas:
    """Areas of the items of one modality in Q packed sequences, concatenated."""

    start: Ints  # [Q + 1]
    area: Ints  # [N] (`spec.heads.Head`)

    @property
    def counts(self) -> Ints:
        """[Q] items of each sequence."""
        return np.diff(self.start)

    def take(self, chosen: Ints) -> ItemAreas:
        """Return the areas of the chosen sequences, in that order."""
        counts = self.counts[chosen]
        return ItemAreas(starts_of(counts), self.area[ranges(self.start[chosen], counts)])

    def per_sequence(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sums [Q, …] of the items' values [N, …]."""
        total = np.cumsum(
            np.concatenate([np.zeros_like(values, shape=(1, *values.shape[1:])), values]), axis=0
        )
        return np.asarray(total[self.start[1:]] - total[self.start[:-1]])

    def lists(self) -> list[list[int]]:
        """Return the areas as a list for each sequence."""
        return [areas.tolist() for areas in np.split(self.area, self.start[1:-1])]


@dataclass(frozen=True)
class Sizes:
    """Sizes of Q packed sequences."""

    tokens: Ints  # [Q] without padding
    length_sq: Ints  # [Q] Σ length² over the samples inside
    items: Mapping[Item, ItemAreas]  # of every modality

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, chosen: Ints) -> Sizes:
        """Return the chosen sequences, in that order; one may be chosen several times."""
        return Sizes(
            self.tokens[chosen],
            self.length_sq[chosen],
            {item: items.take(chosen) for item, items in self.items.items()},
        )

    def work(self, inputs: ModelInputs) -> dict[str, NDArray[np.float64]]:
        """Return, by module name, the work [Q, 3] of each sequence: columns of `Work`."""
        names = (inputs.llm, *(head.module for head in inputs.heads))
        return {name: self.work_of(inputs, name) for name in names}

    def work_of(self, inputs: ModelInputs, module: str) -> NDArray[np.float64]:
        """Return the work [Q, 3] of each sequence in one module."""
        head = inputs.head(module)
        if head is None:
            columns_ = np.ones(len(self)), self.tokens, self.length_sq
            return np.stack(columns_, axis=1)
        items = self.items[head.item]
        return items.per_sequence(columns(head.size(items.area)))


def sizes_of(packing: Packing) -> Sizes:
    """Return the sizes of a packing's sequences."""
    return Sizes(
        packing.tokens,
        packing.length_sq,
        {item: ItemAreas(items.start, items.area) for item, items in packing.items.items()},
    )


def sizes_of_sample(sample: SizeSample) -> Sizes:
    """Return the sizes that a profile stores."""
    return Sizes(
        np.array(sample.tokens, dtype=np.int64),
        np.array(sample.length_sq, dtype=np.int64),
        {item: _areas(sample.areas(item)) for item in KINDS},
    )


def _areas(by_sequence: Sequence[Sequence[int]]) -> ItemAreas:
    return ItemAreas(
        starts_of(np.array([len(areas) for areas in by_sequence], dtype=np.int64)),
        np.array([area for areas in by_sequence for area in areas], dtype=np.int64),
    )


def sampled_batch(sizes: Sizes, count: int, step: int) -> Sizes:
    """Draw a global batch from `sizes`: shuffled, each sequence equally often.

    The draw differs in every step.
    """
    turns = -(-count // len(sizes))
    drawn = [
        np.argsort(mix(SAMPLED_BATCH, step, turn, np.arange(len(sizes))), kind="stable")
        for turn in range(turns)
    ]
    return sizes.take(np.concatenate(drawn)[:count])
