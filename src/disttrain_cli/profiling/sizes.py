"""Which sizes are measured: microbatches drawn from the data's own packed sequences, as training
will see them.

An LLM replica works on M whole sequences of a slot; an encoder or generator replica on its share of
the images or clips that the slot's sequences bring. At least `SEQUENCES` packed sequences are drawn
for every module: published planners that measured one average sample were wrong on skewed data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from disttrain_cli.data.packing import Packing
from disttrain_cli.spec.heads import Grid, Item
from disttrain_cli.spec.work import Work

SEQUENCES = 256
#: Sequences of a draw, in turn.
PER_DRAW = (1, 2, 4)
#: Share of a slot's images that one replica of an encoder or generator gets, in turn.
SHARES = (1.0, 0.5)
#: Draws that the variants beside TP 1 with trained weights are measured on.
FEWER = 18


@dataclass(frozen=True)
class PackedSizes:
    """What one packed sequence holds."""

    documents: list[int]  # tokens of each sample
    items: dict[Item, list[Grid]] = field(default_factory=dict)  # by modality, grids of each


def with_work(item: Item, sequences: Sequence[PackedSizes]) -> list[PackedSizes]:
    """The sequences that bring any such items."""
    return [sequence for sequence in sequences if item == "sequence" or sequence.items.get(item)]


def draw_sizes(item: Item, sequences: Sequence[PackedSizes], seed: int = 0) -> list[dict[str, Any]]:
    """Arguments of `models.probe.probe_batch` for every microbatch to be measured, none of them
    without work.

    Sequences are drawn without repetition until all were drawn, then again.
    """
    random = np.random.default_rng(seed)
    names = list(dict.fromkeys(name for sequence in sequences for name in sequence.items))
    endless = _shuffled_forever(sequences, random)
    draws: list[dict[str, Any]] = []
    drawn = turn = 0
    while drawn < max(SEQUENCES, len(PER_DRAW)):
        chosen = [next(endless) for _ in range(PER_DRAW[turn % len(PER_DRAW)])]
        share = SHARES[turn // len(PER_DRAW) % len(SHARES)]
        drawn += len(chosen)
        turn += 1
        items = {
            name: [grid for sequence in chosen for grid in sequence.items.get(name, [])]
            for name in names
        }
        if item == "sequence":
            draws.append({"documents": [sequence.documents for sequence in chosen], **items})
        elif grids := items.get(item):
            count = max(1, round(share * len(grids)))
            # where all are alike, nothing has to be drawn
            alike = set(grids) == {(1, 1)}
            kept = np.arange(count) if alike else random.permutation(len(grids))[:count]
            draws.append({item: [grids[number] for number in sorted(kept.tolist())]})
    return draws


def fewer(works: Sequence[Work], count: int = FEWER) -> list[int]:
    """Places of `count` draws spread evenly over the sizes, the smallest and the largest among
    them."""
    order = np.argsort([work.tokens for work in works], kind="stable")
    return order[
        np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    ].tolist()


def packed_sizes(packing: Packing) -> list[PackedSizes]:
    """What each sequence of a packing holds."""
    lengths, samples = (
        packing.index.lengths[packing.samples].tolist(),
        packing.sample_start.tolist(),
    )
    items = {
        head.item: [
            [(rows, columns) for rows, columns in grids.tolist()]
            for grids in np.split(
                packing.items[head.item].grid, packing.items[head.item].start[1:-1]
            )
        ]
        for head in packing.index.inputs.heads
    }
    return [
        PackedSizes(
            lengths[samples[number] : samples[number + 1]],
            {item: of_all[number] for item, of_all in items.items()},
        )
        for number in range(len(packing))
    ]


def _shuffled_forever(
    sequences: Sequence[PackedSizes], random: np.random.Generator
) -> Iterator[PackedSizes]:
    while True:
        for index in random.permutation(len(sequences)):
            yield sequences[int(index)]
