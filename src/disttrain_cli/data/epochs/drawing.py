"""Which samples an epoch has: those of every source as often as its weight says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.index import Index
from disttrain_cli.errors import DataError

# Purposes of `mix`, so that equal numbers used for different things give different hashes.
DRAW, ORDER, SEQUENCE_ORDER = 1, 2, 3


def eligible(index: Index, source: int) -> NDArray[np.bool_]:
    """[N] samples of a source that sequences are made of."""
    own, chosen = index.source == source, index.chosen
    return own if chosen is None else own & chosen


def check_drawn(index: Index, most: int) -> None:
    """DataError where the weights of the sources draw no sample, or more than `most` of few."""
    counts = [np.count_nonzero(eligible(index, source)) for source in range(len(index.weights))]
    wanted = sum(weight * count for weight, count in zip(index.weights, counts, strict=True))
    check_most(index, wanted, most)
    if not any(
        int(weight) * count + round((weight - int(weight)) * count)
        for weight, count in zip(index.weights, counts, strict=True)
    ):
        raise DataError(
            "The weights of data.sources draw no sample",
            f"weights: {index.weights}",
            "Raise the weight of at least one source, or lower data.held_out.",
        )


def check_most(index: Index, wanted: float, most: int) -> None:
    """DataError where an epoch draws more than `most` samples, or sixteen times as many as there
    are."""
    most = max(most, 16 * len(index.source))
    if wanted > most:
        raise DataError(
            f"The weights of data.sources draw {wanted:,.0f} samples in an epoch",
            f"samples: {len(index.source):,}; allowed: {most:,}",
            "Lower all of them: the mixture follows from their ratios.",
        )
