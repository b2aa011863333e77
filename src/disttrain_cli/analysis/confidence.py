"""Confidence of a verdict, from its raw evidence and how often such verdicts were right.

The raw evidence of a verdict is the probability that it holds if steps are independent: that a
cause saves more than the least that counts, and more than the next cause; for "none", that no cause
does. It is lowered by what the replay leaves unexplained, by few steps, by ranks whose traces are
missing, and if it depends on one event. `CALIBRATION` maps it to a confidence.
"""

from __future__ import annotations

from math import erf, sqrt

import numpy as np

from disttrain_cli.analysis.walk import Floats

#: Difference of the savings of two equal jobs, as a share of a step, however many steps they have.
FLOOR = 0.005


def exceeds(shares: Floats, least: float) -> float:
    """Return the probability that more such steps have a mean of `shares` [steps] above `least`."""
    spread = sqrt(float(np.var(shares)) / len(shares) + FLOOR**2)
    return 0.5 + 0.5 * erf((float(shares.mean()) - least) / (spread * sqrt(2)))


def known(
    unexplained: float,
    steps: int,
    present: float = 1.0,
    unclassified: float = 0.0,
    repaired: float = 0.0,
) -> float:
    """Return a factor from 0 to 1 for the evidence of a job.

    Args:
        unexplained: share of a step that the replay does not explain.
        steps: number of steps.
        present: share of the job's ranks that have traces.
        unclassified: share of kernels that are unclassified.
        repaired: share of kernels that are repaired.
    """
    return (
        max(0.0, 1.0 - abs(unexplained))
        * (1.0 - 0.5**steps)
        * present
        * (1.0 - unclassified)
        * (1.0 - repaired)
    )


def calibrated(raw: float, kind: str) -> float:
    """Return how often verdicts with such evidence were right, for traces of format `kind`."""
    evidence, right = zip(*CALIBRATION[kind], strict=True)
    return round(float(np.interp(raw, evidence, right)), 3)


#: By format, raw evidence and the share of verdicts that were right, interpolated linearly; from
#: `benchmarks.calibration`.
CALIBRATION: dict[str, tuple[tuple[float, float], ...]] = {
    "disttrain": ((0.0, 0.0), (0.405, 0.75), (0.575, 0.857), (0.761, 0.875), (0.939, 0.982)),
    "operations": ((0.0, 0.0), (0.653, 0.857), (0.999, 0.975)),
    "kineto": ((0.0, 0.0), (0.351, 0.848), (0.51, 0.957), (0.748, 0.964), (0.949, 0.988)),
}
