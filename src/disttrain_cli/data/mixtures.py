"""Weights of the sources in an epoch, and the step from which each mixture applies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

DIGITS = 6  # of a weight: powers differ in the last bit between machines


def weights_of(weights: Sequence[float], counts: Sequence[int], temperature: float) -> list[float]:
    """Return weights that draw sources in proportion to (weight · samples)^(1 / temperature).

    In total, as many samples are drawn as by the given weights (temperature-scaled mixing: Raffel
    et al. 2020, T5, arXiv 1910.10683, section 3.5.2).

    Args:
        weights: weight of each source; returned unchanged at temperature 1.
        counts: samples of each source that may be drawn.
    """
    drawn = [weight * count for weight, count in zip(weights, counts, strict=True)]
    if temperature == 1 or not any(drawn):
        return list(weights)
    shares = [amount ** (1 / temperature) for amount in drawn]
    total = sum(shares)
    return [
        round(sum(drawn) * share / total / count, DIGITS) if count else weight
        for weight, count, share in zip(weights, counts, shares, strict=True)
    ]


Phases = list[tuple[int, list[float]]]  # (first step, weight of each source)


def go_on(past: Phases, step: int, stated: Phases) -> Phases:
    """Return the phases of a run that resumes at a step.

    Args:
        past: the phases up to the step.
        stated: the phases of the run file, which apply from the step on.
    """
    if not past:
        return stated
    at = [weights for first, weights in stated if first <= step][-1]
    same = all(one == other for one, other in zip_longest(past[-1][1], at, fillvalue=0))
    now = [] if same else [(step, at)]
    return [*past, *now, *((first, weights) for first, weights in stated if first > step)]
