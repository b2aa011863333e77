"""Test of whether two runs differ by more than their steps differ among themselves.

Of every figure there is a sample per step. Steps next to each other resemble each other, so each
run's are first averaged to at most `MOST_BATCHES` means of consecutive steps (batch means);
Welch's t-test compares the means of these, for unequal variances. The step is the primary
comparison, chosen before any result, and is tested at `LEVEL` by itself. All other figures are one
family: their p-values are Holm's, so the chance that any of those called significant is noise stays
below `LEVEL`. The interval of a difference is that of the same test at 95 %, of this figure alone,
so that of a significant step excludes zero.

Where noise has a correlation of 0.8 from step to step, a single figure at 5 % calls 7 % of equal
runs of 200 steps different (51 % without batches), and 27 % of runs of 40 steps.

The test does not cover how much two starts of one run differ: steps are of one start each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05
MOST_BATCHES = 10
RESOLUTION = 1e-9  # of times: what differs less is equal
LEAST_STEPS = 3  # of each run; fewer do not show the noise


class Difference(NamedTuple):
    """After less before, with the 95 % interval and the p-value of this figure alone; None where
    steps are too few to estimate the noise."""

    mean: float
    low: float | None
    high: float | None
    p: float | None


def difference(before: NDArray[np.float64], after: NDArray[np.float64]) -> Difference:
    """Compare samples of the steps of two runs."""
    mean = float(after.mean() - before.mean())
    if min(len(before), len(after)) < LEAST_STEPS:
        return Difference(mean, None, None, None)
    first, second = batches(before), batches(after)
    spread = float(first.std() + second.std())
    if spread <= RESOLUTION * max(abs(float(first.mean())), abs(float(second.mean()))):
        same = abs(mean) <= RESOLUTION * max(abs(float(first.mean())), 1e-300)
        return Difference(mean, mean, mean, 1.0 if same else 0.0)  # steps without any noise
    from scipy.special import stdtr, stdtrit

    of_first, of_second = (float(one.var(ddof=1)) / len(one) for one in (first, second))
    error = math.sqrt(of_first + of_second)
    freedom = (of_first + of_second) ** 2 / (
        of_first**2 / (len(first) - 1) + of_second**2 / (len(second) - 1)
    )
    between = float(second.mean() - first.mean())  # batches may differ by one step
    wide = float(stdtrit(freedom, 0.975)) * error
    p = 2 * float(stdtr(freedom, -abs(between) / error))
    return Difference(mean, between - wide, between + wide, p)


def batches(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means of at most `MOST_BATCHES` runs of consecutive values of nearly equal length; few values
    unchanged."""
    if len(values) <= MOST_BATCHES:
        return values
    return np.array([part.mean() for part in np.array_split(values, MOST_BATCHES)])


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values; None stays, and is not counted."""
    order = sorted(
        (number for number, p in enumerate(p_values) if p is not None),
        key=lambda number: p_values[number] or 0.0,
    )
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for place, number in enumerate(order):
        p = p_values[number]
        assert p is not None
        largest = max(largest, min(1.0, p * (len(order) - place)))
        adjusted[number] = largest
    return adjusted
