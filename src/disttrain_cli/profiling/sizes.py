"""Which sizes are measured: microbatches drawn from the data's own packed sequences, as training will see them.

An LLM replica works on M whole sequences of a slot; an encoder or generator replica on its share of the images
that the slot's sequences bring. At least `SEQUENCES` packed sequences are drawn for every module: published
planners that measured one average sample were wrong on skewed data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SEQUENCES = 256
#: Sequences of a draw, in turn.
PER_DRAW = (1, 2, 4)
#: Share of a slot's images that one replica of an encoder or generator gets, in turn.
SHARES = (1.0, 0.5)


@dataclass(frozen=True)
class PackedSizes:
    """What one packed sequence holds."""

    documents: list[int]  # tokens of each sample
    grids: list[tuple[int, int]]  # patches (rows, columns) of each image read
    targets: int  # images to generate


def draw_sizes(kind: str, sequences: Sequence[PackedSizes], seed: int = 0) -> list[dict[str, Any]]:
    """Arguments of `models.probe.probe_batch` for every microbatch to be measured, none of them without work.

    Sequences are drawn without repetition until all were drawn, then again. A module for which the data has no
    work gets no draws.
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
        targets = sum(sequence.targets for sequence in chosen)
        if kind == "llm":
            draws.append({"documents": [sequence.documents for sequence in chosen], "grids": grids, "targets": targets})
        elif kind == "encoder" and grids:
            kept = random.permutation(len(grids))[: max(1, round(share * len(grids)))]
            draws.append({"grids": [grids[i] for i in sorted(kept.tolist())]})
        elif kind == "generator" and targets:
            draws.append({"targets": max(1, round(share * targets))})
    return draws


def _shuffled_forever(sequences: Sequence[PackedSizes], random: np.random.Generator) -> Iterator[PackedSizes]:
    while True:
        for place in random.permutation(len(sequences)):
            yield sequences[int(place)]
