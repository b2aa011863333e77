"""Which sizes are measured: microbatches drawn from the data's own packed sequences, as training
will see them.

An LLM replica works on M whole sequences of a slot; an encoder or generator replica on its share of
the images or clips that the slot's sequences bring. At least `SEQUENCES` packed sequences are drawn
for every module: published planners that measured one average sample were wrong on skewed data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from disttrain_cli.data.packing import Packing
from disttrain_cli.spec.inputs import Item
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
    grids: list[tuple[int, int]]  # patches (rows, columns) of each image read
    targets: int  # images to generate
    clips: int = 0  # audio clips


def with_work(item: Item, sequences: Sequence[PackedSizes]) -> list[PackedSizes]:
    """The sequences that bring any such items."""
    counts = {
        "image": lambda sequence: len(sequence.grids),
        "audio": lambda sequence: sequence.clips,
        "sequence": lambda sequence: 1,
        "target": lambda sequence: sequence.targets,
    }
    return [sequence for sequence in sequences if counts[item](sequence)]


def draw_sizes(item: Item, sequences: Sequence[PackedSizes], seed: int = 0) -> list[dict[str, Any]]:
    """Arguments of `models.probe.probe_batch` for every microbatch to be measured, none of them
    without work.

    Sequences are drawn without repetition until all were drawn, then again.
    """
    random = np.random.default_rng(seed)
    endless = _shuffled_forever(sequences, random)
    draws: list[dict[str, Any]] = []
    drawn = turn = 0
    while drawn < max(SEQUENCES, len(PER_DRAW)):
        chosen = [next(endless) for _ in range(PER_DRAW[turn % len(PER_DRAW)])]
        share = SHARES[turn // len(PER_DRAW) % len(SHARES)]
        drawn += len(chosen)
        turn += 1
        grids = [grid for sequence in chosen for grid in sequence.grids]
        clips, targets = (
            sum(sequence.clips for sequence in chosen),
            sum(sequence.targets for sequence in chosen),
        )
        if item == "sequence":
            draws.append(
                {
                    "documents": [sequence.documents for sequence in chosen],
                    "grids": grids,
                    "clips": clips,
                    "targets": targets,
                }
            )
        elif item == "image" and grids:
            kept = random.permutation(len(grids))[: max(1, round(share * len(grids)))]
            draws.append({"grids": [grids[i] for i in sorted(kept.tolist())]})
        elif item == "audio" and clips:
            draws.append({"clips": max(1, round(share * clips))})
        elif item == "target" and targets:
            draws.append({"targets": max(1, round(share * targets))})
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
    lengths = packing.index.lengths[packing.samples].tolist()
    grids = [(rows, columns) for rows, columns in packing.image_grid.tolist()]
    samples, images = packing.sample_start.tolist(), packing.image_start.tolist()
    targets, clips = np.diff(packing.target_start).tolist(), packing.clips.tolist()
    return [
        PackedSizes(
            lengths[samples[i] : samples[i + 1]],
            grids[images[i] : images[i + 1]],
            targets[i],
            clips[i],
        )
        for i in range(len(packing))
    ]


def _shuffled_forever(
    sequences: Sequence[PackedSizes], random: np.random.Generator
) -> Iterator[PackedSizes]:
    while True:
        for place in random.permutation(len(sequences)):
            yield sequences[int(place)]
