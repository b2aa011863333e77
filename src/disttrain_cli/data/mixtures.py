"""How often each source is drawn in an epoch, and from which step on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

DIGITS = 6  # of a weight: powers are not the same to the last bit on all machines


def weights_of(given: Sequence[float], counts: Sequence[int], temperature: float) -> list[float]:
    """Weights that draw sources in proportion to (weight · samples)^(1 / temperature), with as many
    samples in all as the given weights draw (temperature-scaled mixing: Raffel et al. 2020, T5,
    arXiv 1910.10683, section 3.5.2).

    Args:
        given: of each source; at temperature 1 they stay.
        counts: samples of each source that may be drawn.
    """
    drawn = [weight * count for weight, count in zip(given, counts, strict=True)]
    if temperature == 1 or not any(drawn):
        return list(given)
    shares = [amount ** (1 / temperature) for amount in drawn]
    total = sum(shares)
    return [
        round(sum(drawn) * share / total / count, DIGITS) if count else weight
        for weight, count, share in zip(given, counts, shares, strict=True)
    ]


Phases = list[tuple[int, list[float]]]  # (first step, weight of each source)


def go_on(past: Phases, step: int, stated: Phases) -> Phases:
    """The phases of a run that has had `past` phases up to a step, and follows `stated` ones from
    there on."""
    if not past:
        return stated
    at = [weights for first, weights in stated if first <= step][-1]
    same = all(one == other for one, other in zip_longest(past[-1][1], at, fillvalue=0))
    now = [] if same else [(step, at)]
    return [*past, *now, *((first, weights) for first, weights in stated if first > step)]
