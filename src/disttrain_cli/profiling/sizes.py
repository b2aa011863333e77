"""Choice of the measured sizes: microbatches drawn from the data's own packed sequences.

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
#: Sequences of a draw, in turn; on a GPU more, up to a global batch.
PER_DRAW, CUDA_PER_DRAW = (1, 2, 4), (1, 2, 4, 8, 16)
#: Least FLOPs, in multiples of the smallest draw's, of the second draw that is measured regardless
#: of the budget: with two draws of different size, a fit is not a constant.
LARGER = 1.5
#: Share of a slot's images that one replica of an encoder or generator gets, in turn.
SHARES = (1.0, 0.5)
#: Ranges of an amount of work below this count as zero.
NOTHING = 1e-9


@dataclass(frozen=True)
class PackedSizes:
    """Contents of one packed sequence."""

    documents: list[int]  # tokens of each sample
    items: dict[Item, list[Grid]] = field(default_factory=dict)  # by modality, grids of each


def with_work(item: Item, sequences: Sequence[PackedSizes]) -> list[PackedSizes]:
    """Return the sequences that have any such items."""
    return [sequence for sequence in sequences if item == "sequence" or sequence.items.get(item)]


def draw_sizes(
    item: Item,
    sequences: Sequence[PackedSizes],
    seed: int = 0,
    per_draw: Sequence[int] = PER_DRAW,
) -> list[dict[str, Any]]:
    """Draw arguments of `models.probe.probe_batch` for every microbatch to be measured.

    None of them is without work. Sequences are drawn without repetition until all were drawn, then
    again.
    """
    random = np.random.default_rng(seed)
    names = list(dict.fromkeys(name for sequence in sequences for name in sequence.items))
    endless = _shuffled_forever(sequences, random)
    draws: list[dict[str, Any]] = []
    drawn = turn = 0
    while drawn < max(SEQUENCES, len(per_draw)):
        chosen = [next(endless) for _ in range(per_draw[turn % len(per_draw)])]
        share = SHARES[turn // len(per_draw) % len(SHARES)]
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
            # items of one size are interchangeable: no draw is needed
            alike = set(grids) == {(1, 1)}
            kept = np.arange(count) if alike else random.permutation(len(grids))[:count]
            draws.append({item: [grids[number] for number in sorted(kept.tolist())]})
    return draws


def spread(works: Sequence[Work]) -> list[int]:
    """Return indices of draws in the order of measuring: smallest, largest, then the farthest.

    Farthest is the draw with the largest distance from all before it, so that any prefix of the
    order spans the sizes. Distances are between logarithms of the amounts of work, each as a share
    of its range, because a fit's relative error counts.
    """
    amounts = np.log1p(np.array(works, dtype=np.float64).reshape(-1, 3))
    amounts = (amounts - amounts.min(axis=0)) / np.maximum(np.ptp(amounts, axis=0), NOTHING)
    sums = amounts.sum(axis=1)
    order = list(dict.fromkeys([int(sums.argmin()), int(sums.argmax())]))
    gaps = np.min([np.linalg.norm(amounts - amounts[draw], axis=1) for draw in order], axis=0)
    gaps[order] = -1.0
    while len(order) < len(works):
        order.append(int(gaps.argmax()))
        gaps = np.minimum(gaps, np.linalg.norm(amounts - amounts[order[-1]], axis=1))
        gaps[order] = -1.0
    return order


def sequences_per_draw(kind: str, global_batch_size: int) -> list[int]:
    """Return the numbers of sequences of draws on a device of this kind."""
    counts = CUDA_PER_DRAW if kind == "cuda" else PER_DRAW
    return [count for count in counts if count <= max(global_batch_size, PER_DRAW[-1])]


def needed_draws(order: Sequence[int], flops: Sequence[float], kind: str) -> list[int]:
    """Return the draws that are measured regardless of the budget: the smallest and a larger one.

    On a GPU the largest too. It waits for its host at small sizes, so that a line through these
    alone is too flat: of an LLM of 1.2 billion weights it promised a forward of 16 sequences in 94
    ms, more than the peak allows (an H200, 2026-11-27).

    Args:
        order: as `spread` returns it.
    """
    larger = [draw for draw in order if flops[draw] >= LARGER * flops[order[0]]]
    needed = [*order[: 2 if kind == "cuda" else 1], *sorted(larger, key=lambda one: flops[one])[:1]]
    return list(dict.fromkeys(needed))


def packed_sizes(packing: Packing) -> list[PackedSizes]:
    """Return the contents of each sequence of a packing."""
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
