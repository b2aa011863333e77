"""Buckets of a stage's layers: what is reduced in one message while the last pass of a step that
makes gradients still runs, and gathered in one before the next step's first forward gets there."""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_NUMBERS = 1 << 26  # at least, of a rank: large enough that latency does not count


def buckets(numbers_by_layer: Sequence[int]) -> list[range]:
    """Consecutive local layers in layer order, as messages carry them; together all layers.

    Filled from the last layer backwards, the order in which a backward makes gradients: a bucket
    closes once it holds `BUCKET_NUMBERS`, so that only the first may hold fewer.

    Args:
        numbers_by_layer: trained numbers of each layer of a stage on one rank.
    """
    found: list[range] = []
    stop, held = len(numbers_by_layer), 0
    for layer in reversed(range(len(numbers_by_layer))):
        held += numbers_by_layer[layer]
        if held >= BUCKET_NUMBERS or layer == 0:
            found.append(range(layer, stop))
            stop, held = layer, 0
    return found[::-1]
