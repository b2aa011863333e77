"""Fits of polynomials in work to measurements: non-negative least squares of the relative error.

time = base + per_item·items + per_token·tokens + per_length_sq·Σ length², every coefficient ≥ 0. A
negative cost has no meaning and would let a planner find work that pays for itself; with
non-negative coefficients, correlated features (an LLM's sequences of one length) share the cost
instead of cancelling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.work import Work

Floats = NDArray[np.float64]

#: Every HELD_OUT-th measurement is held out to evaluate a fit of the others.
HELD_OUT = 3
#: Values below this share of the mean are weighted as if they were that share (a relative error of
#: a value near zero is meaningless).
WEIGHT_FLOOR = 1e-3
#: Terms that contribute less than this share of every value are rounding errors.
NOTHING = 1e-9


def features(works: Sequence[Work]) -> Floats:
    """Return rows [1, items, tokens, Σ length²], one per work."""
    table = np.array(works, dtype=np.float64).reshape(-1, 3)
    return np.hstack([np.ones((len(table), 1)), table])


def fit(works: Sequence[Work], values: Sequence[float] | Floats) -> Polynomial:
    """Fit the polynomial with coefficients ≥ 0 and the least squared relative error.

    The values at `works` must be ≥ 0.
    """
    from scipy.optimize import nnls

    measured = np.asarray(values, dtype=np.float64)
    assert len(works) == len(measured) > 0 and measured.min() >= 0.0
    if measured.max() == 0.0:
        return Polynomial()
    rows = features(works) / np.maximum(measured, WEIGHT_FLOOR * measured.mean())[:, None]
    target = measured / np.maximum(measured, WEIGHT_FLOOR * measured.mean())
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0.0] = 1.0
    coefficients, _ = nnls(rows / scale, target)
    coefficients[coefficients < NOTHING] = 0.0
    base, per_item, per_token, per_length_sq = (coefficients / scale).tolist()
    return Polynomial(
        base=base, per_item=per_item, per_token=per_token, per_length_sq=per_length_sq
    )


def predict(polynomial: Polynomial, works: Sequence[Work]) -> Floats:
    """Evaluate the polynomial at every work."""
    return np.array([polynomial(work) for work in works])


def held_out_error_pct(works: Sequence[Work], series: Sequence[Sequence[float] | Floats]) -> float:
    """Return the mean absolute error in percent of the sum of `series` on held-out measurements.

    Each series is fitted without the held-out third, which is taken evenly over the order of
    tokens, so that it spans the sizes. With fewer than six measurements the fit is evaluated on the
    measurements it was made from.
    """
    order = np.argsort([work.tokens for work in works], kind="stable")
    judged = order[1::HELD_OUT] if len(order) >= 2 * HELD_OUT else order
    used = np.setdiff1d(order, judged) if len(order) >= 2 * HELD_OUT else order
    measured = np.zeros(len(judged))
    predicted = np.zeros(len(judged))
    for values in series:
        table = np.asarray(values, dtype=np.float64)
        polynomial = fit([works[i] for i in used], table[used])
        measured += table[judged]
        predicted += predict(polynomial, [works[i] for i in judged])
    if measured.max() == 0.0:
        return 0.0
    known = measured > 0.0
    return float(100.0 * np.mean(np.abs(predicted[known] - measured[known]) / measured[known]))
