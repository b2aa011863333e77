"""Distribution of rows over the experts of a mixture, and what an EP group's ranks get of it.

Two distributions. With a model's weights, `profile` measures which experts the data's rows choose,
by layer and modality (`spec.layer_costs.Routed`). Without them it is a stated one: the shares of a
layer's experts are log-normal with `SPREAD`, of its own in every layer, and rows choose by these
shares. Log-normal counts fit recorded loads of DeepSeek-V3 best (DeepEP, pull request 393).
Published measurements differ by data: Gini coefficients of 0.11 to 0.29 on plain text and up to
0.38 on mock tokens, for five models of 64 to 256 experts (Ma et al. 2026, arXiv 2605.20982); on
few thousand tokens of one domain an entropy as of spreads of 1.0 to 1.2 for Qwen3-30B-A3B (handbook
of gpu-container, "Routing De-risk"); image tokens are further from uniform than text (Cai et al.
2025, arXiv 2507.01351). 0.7 is a Gini coefficient of 0.38 (erf(σ/2)), the upper end of the first,
since a microbatch of a fine-tuning holds few images and one domain.

The chosen experts of a row differ, so no expert gets more than all rows: shares are at most
1 / chosen. Factors below are closed forms by three moments, as the planner needs many of them. Of
an EP group of R ranks with E / R experts each, over L layers, a rank's load over the mean is
1 + Y_r − mean(Y), with independent Y_r: sums of log-normal shares, and the noise of drawing. Sums
of log-normals are nearly log-normal with an offset, of equal mean, variance and skewness. Quantiles
and expectations are within 4 % of 300 drawn groups for 128 and 256 experts, and above them for 8
and for ranks with one expert.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.spec.layer_costs import Experts, LayerCost, Routed
from disttrain_cli.spec.profile import Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: Standard deviation of the logarithms of experts' shares in a layer, where they are not measured.
SPREAD = 0.7
#: Probability with which the memory that a plan reserves is enough for the fullest rank of an EP
#: group.
QUANTILE = 0.99
NORMAL = NormalDist()
POINTS = 64  # of the quadrature of an expectation


def drawn(experts: Experts, seed: int, *, ep: int, rows: int, layers: int = 1) -> Ints:
    """Return [L, R, R] rows that each rank of an EP group sends to each, drawn for a seed.

    The second axis has the senders; a sum over it is what arrives. A row counts once for each of
    its chosen experts.

    Args:
        ep: ranks of the group, R.
        rows: of each rank.
        layers: mixtures in a row, L.
    """
    random = np.random.default_rng(seed)
    if experts.routed:
        shares = np.resize(measured_shares(experts), (layers, experts.total))
    else:
        shares = np.exp(SPREAD * random.standard_normal((layers, experts.total)))
        shares = _at_most(shares / shares.sum(axis=1, keepdims=True), 1.0 / experts.chosen)
    by_rank = shares.reshape(layers, 1, ep, -1).sum(axis=3).repeat(ep, axis=1)
    return random.multinomial(rows * experts.chosen, by_rank / by_rank.sum(axis=2, keepdims=True))


def _at_most(shares: Floats, most: float) -> Floats:
    """Return shares [L, E] with what is above `most` distributed over the others, in proportion."""
    while (shares > most * (1.0 + 1e-9)).any():
        full = shares >= most
        others = np.where(full, 0.0, shares)
        left = 1.0 - most * full.sum(axis=1, keepdims=True)
        total = others.sum(axis=1, keepdims=True)
        shares = np.where(full, most, others * left / np.where(total, total, 1.0))
    return shares


@cache
def fullest(
    experts: Experts, *, ep: int, rows: float, layers: int = 1, quantile: float = QUANTILE
) -> float:
    """Return the rows of `layers` mixtures at the fullest rank of an EP group over their mean.

    It is exceeded with a probability of 1 − `quantile` at most. `rows` are those of each rank in a
    microbatch. Of measured mixtures those `layers` in a row count that have most. 1 without a
    group.
    """
    if ep == 1:
        return 1.0
    normal = np.array(NORMAL.inv_cdf(1.0 - (1.0 - quantile) / ep))
    if experts.routed:
        load, noise = _measured(experts, ep, rows)
        sums, squares = (
            np.lib.stride_tricks.sliding_window_view(each, min(layers, len(each)), axis=0)
            for each in (load, noise**2)
        )
        at_rank = sums.mean(axis=2) + normal * np.sqrt(squares.mean(axis=2) / layers)
        return min(float(at_rank.max()), _most(experts, ep))
    deviation, skewness = _spread(experts.total, experts.chosen, ep, rows, layers)
    # of the rank's own part and of the mean, which is subtracted: κ2 and κ3 of a rank's load
    other = 1.0 - 1.0 / ep
    more = _standard(normal, skewness * (1.0 - 2.0 / ep) / math.sqrt(other))
    return min(1.0 + deviation * math.sqrt(other) * float(more), _most(experts, ep))


@cache
def slowest(experts: Experts, *, ep: int, rows: float) -> float:
    """Return the expected rows of a mixture at the fullest rank of an EP group over their mean.

    All ranks wait for it in every layer, so that this holds for any number of them. Of measured
    mixtures it is the mean. 1 without a group.
    """
    if ep == 1:
        return 1.0
    largest = _largest_normals(ep)
    if experts.routed:
        load, noise = _measured(experts, ep, rows)
        return min(float((load + largest.mean() * noise).max(axis=1).mean()), _most(experts, ep))
    deviation, skewness = _spread(experts.total, experts.chosen, ep, rows, 1)
    return min(1.0 + deviation * float(_standard(largest, skewness).mean()), _most(experts, ep))


def reached(experts: Experts, share: float) -> float:
    """Return the share of rows that choose any expert of some, which are chosen with `share`.

    It is that of an equal run of experts of a mixture, exact where shares are equal: a row's chosen
    experts differ.
    """
    left = 1.0
    for drawn in range(experts.chosen):
        left *= max(0.0, 1.0 - share * experts.total / (experts.total - drawn))
    return 1.0 - left


def balanced(profile: Profile) -> Profile:
    """Return a profile in which every expert gets equally many rows in every microbatch."""

    def even(cost: LayerCost) -> LayerCost:
        if (experts := cost.experts) is None:
            return cost
        shares = " ".join(["1"] * experts.total)
        routed = (Routed("text", 1.0, 0.0, (shares,)),)
        return cost.model_copy(update={"experts": experts._replace(routed=routed)})

    modules = {
        name: module.model_copy(
            update={"costs": {kind: even(cost) for kind, cost in module.costs.items()}}
        )
        for name, module in profile.modules.items()
    }
    return profile.model_copy(update={"modules": modules})


@cache
def measured_shares(experts: Experts) -> Floats:
    """Return [L, E] each expert's share of the rows in every measured layer, by the data's mix."""
    parts = [
        one.share * shares / shares.sum(axis=1, keepdims=True)
        for one in experts.routed
        for shares in [np.array([np.fromstring(layer, sep=" ") for layer in one.layers])]
    ]
    mixed: Floats = np.sum(parts, axis=0)
    return mixed / mixed.sum(axis=1, keepdims=True)


def _measured(experts: Experts, ep: int, rows: float) -> tuple[Floats, Floats]:
    """Return [L, R] the mean load of each rank over the mean, and its deviation by drawing."""
    share = measured_shares(experts).reshape(-1, ep, experts.total // ep).sum(axis=2)
    dispersion = sum(one.share * one.dispersion for one in experts.routed)
    drawn = rows * ep * experts.chosen
    return ep * share, ep * np.sqrt(dispersion * share * (1.0 - share) / drawn)


@cache
def _largest_normals(count: int) -> Floats:
    """Return evenly spaced quantiles of the largest of independent standard normals."""
    points = (np.arange(POINTS) + 0.5) / POINTS
    return np.array([NORMAL.inv_cdf(float(point) ** (1.0 / count)) for point in points])


def _most(experts: Experts, ep: int) -> float:
    """Return the load over the mean of a rank whose experts all rows choose."""
    return ep * min(1.0, experts.total / ep / experts.chosen)


def _spread(total: int, chosen: int, ep: int, rows: float, layers: int) -> tuple[float, float]:
    """Return deviation and skewness of Y: a rank's summed shares over their mean, in one draw."""
    growth = math.expm1(SPREAD**2)  # squared coefficient of variation of a log-normal
    experts = total / ep * layers
    variance = growth / experts + 1.0 / (rows * chosen * layers)
    third = growth**2 * (growth + 3.0) / experts**2
    return math.sqrt(variance), third / variance**1.5


def _standard(normal: Floats, skewness: float) -> Floats:
    """Return quantiles of a standardised log-normal with an offset, at those of a normal."""
    if skewness < 1e-6:
        return normal
    cube = (1.0 + skewness**2 / 2.0 + skewness * math.sqrt(1.0 + skewness**2 / 4.0)) ** (1.0 / 3.0)
    growth = cube + 1.0 / cube - 2.0
    scale = math.sqrt(math.log1p(growth))
    return np.expm1(scale * normal - scale**2 / 2.0) / math.sqrt(growth)
