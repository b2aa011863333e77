"""Buckets of a stage's layers, each reduced and gathered in one message.

Gradients are reduced while the last pass of a step that produces them still runs, weights gathered
before the next step's first forward reaches their layers.
"""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_NUMBERS = 1 << 26  # at least, per rank: large enough that latency does not count


def buckets(numbers_by_layer: Sequence[int]) -> list[range]:
    """Return the buckets of a stage: consecutive local layers in order, together all layers.

    Filled from the last layer backwards, the order in which a backward produces gradients: a bucket
    closes once it holds `BUCKET_NUMBERS`, so that only the first may hold fewer.

    Args:
        numbers_by_layer: trained parameters of each layer of a stage on one rank.
    """
    found: list[range] = []
    stop, held = len(numbers_by_layer), 0
    for layer in reversed(range(len(numbers_by_layer))):
        held += numbers_by_layer[layer]
        if held >= BUCKET_NUMBERS or layer == 0:
            found.append(range(layer, stop))
            stop, held = layer, 0
    return found[::-1]
