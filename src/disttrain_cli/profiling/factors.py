"""Robust fit of a factor ≥ 0 for each of several known terms of a measured sum.

measured = known + Σ factor · term. Measurements may contain noise, stalls and slow ranks. The
common factor of all terms is the median ratio. Deviations from it are fitted by reweighted least
squares of the relative error (Cauchy's weights: a far outlier counts for nothing), with a ridge
towards the common factor as weak as a prior of `SPREAD`: terms that the measurements cannot tell
apart keep their proportions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Standard deviation expected of a factor around the common one.
SPREAD = 0.3
#: Largest effective number of measurements: beyond it they are of the same few stages, whose
#: errors are not independent.
ENOUGH = 50
#: Smallest relative noise assumed of a measurement.
LEAST_NOISE = 1e-3
#: Smallest common factor: the median alone must not make terms vanish.
LEAST_FACTOR = 1e-3
#: Residuals beyond this many standard deviations lose their weight (95 % efficiency on normal
#: noise).
CAUCHY = 2.385
ROUNDS, GENTLE_ROUNDS = 30, 5
CLOSE = 1e-7


def fit_factors(terms: Floats, measured: Floats, known: Floats | None = None) -> Floats:
    """Fit factors [U] of terms [N, U] that add up to the measurements [N].

    Args:
        terms: contribution of each term to each measurement, ≥ 0, with a sum > 0 in every row.
        known: part of each measurement that is already accounted for [N].
    """
    from scipy.optimize import nnls

    assert len(terms) and terms.sum(axis=1).min() > 0.0
    known = np.zeros(len(terms)) if known is None else known
    common = max(LEAST_FACTOR, float(np.median((measured - known) / terms.sum(axis=1))))
    whole = known + common * terms.sum(axis=1)
    rows, target = common * terms / whole[:, None], (measured - known) / whole
    count = terms.shape[1]
    share = np.ones(count)
    for turn in range(ROUNDS):
        residual = rows @ share - target
        noise = max(LEAST_NOISE, 1.4826 * float(np.median(np.abs(residual))))
        far = 1.0 + (residual / (CAUCHY * noise)) ** 2
        weight = (
            far ** (-0.5 if turn < GENTLE_ROUNDS else -1.0)
            * min(1.0, ENOUGH / len(rows))
            / noise**2
        )
        root = np.sqrt(weight)[:, None]
        small = np.linalg.qr(np.hstack([rows, target[:, None]]) * root).R
        before, (share, _) = (
            share,
            nnls(
                np.vstack([small[:, :count], np.eye(count) / SPREAD]),
                np.concatenate([small[:, count], np.full(count, 1.0 / SPREAD)]),
            ),
        )
        if turn > GENTLE_ROUNDS and np.abs(share - before).max() < CLOSE:
            break
    return common * share


def error_pct(predicted: Floats, measured: Floats) -> float:
    """Return the mean absolute error in percent of the mean measurement.

    For many similar measurements, whose noise is symmetric.
    """
    return float(100.0 * np.abs(predicted - measured).sum() / measured.sum())


def each_error_pct(predicted: Floats, measured: Floats) -> float:
    """Return the mean of the absolute errors in percent of each measurement.

    For few and different measurements, whose noise is only additive.
    """
    return float(100.0 * np.mean(np.abs(predicted - measured) / measured))
