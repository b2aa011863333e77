"""Test of whether two runs differ by more than their steps differ among themselves.

Every figure has a sample per step. Neighbouring steps are correlated, so each run's samples are
first averaged to at most `MOST_BATCHES` means of consecutive steps (batch means); Welch's t-test
compares the means of these, for unequal variances. The step is the primary comparison, chosen
before any result, and is tested at `LEVEL` by itself. All other figures are one family: their
p-values are Holm's, so the probability that any of those called significant is noise stays below
`LEVEL`. The interval of a difference is that of the same test at 95 %, for this figure alone, so
the interval of a significant step excludes zero.

With a correlation of 0.8 from step to step, a single figure at 5 % calls 7 % of equal runs of 200
steps different (51 % without batches), and 27 % of runs of 40 steps.

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
RESOLUTION = 1e-9  # relative; times that differ less are equal
LEAST_STEPS = 3  # of each run; fewer do not show the noise


class Difference(NamedTuple):
    """Difference after − before, with this figure's 95 % interval and p-value.

    Interval and p-value are None if there are too few steps to estimate the noise.
    """

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
    """Return at most `MOST_BATCHES` means of consecutive values, in nearly equal parts.

    As many values or fewer are returned unchanged.
    """
    if len(values) <= MOST_BATCHES:
        return values
    return np.array([part.mean() for part in np.array_split(values, MOST_BATCHES)])


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return Holm's adjusted p-values; None stays None and does not count."""
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
