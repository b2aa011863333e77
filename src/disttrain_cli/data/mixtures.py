"""How often each source is drawn in an epoch."""

from __future__ import annotations

from collections.abc import Sequence

DIGITS = 6  # of a weight: powers are not the same to the last bit on all machines


def weights_of(given: Sequence[float], counts: Sequence[int], temperature: float) -> list[float]:
    """Weights that draw sources in proportion to (weight · samples)^(1 / temperature), with as many
    samples in all as the given weights draw (temperature-scaled mixing: Raffel et al. 2020, T5,
    arXiv 1910.10683, section 3.5.2).

    Args:
        given: of each source; at temperature 1 they stay.
        counts: samples of each source that may be drawn.
    """
    if temperature == 1:
        return list(given)
    drawn = [weight * count for weight, count in zip(given, counts, strict=True)]
    shares = [amount ** (1 / temperature) for amount in drawn]
    total = sum(shares)
    return [
        round(sum(drawn) * share / total / count, DIGITS) if count else weight
        for weight, count, share in zip(given, counts, shares, strict=True)
    ]
