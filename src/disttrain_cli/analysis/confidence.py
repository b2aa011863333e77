"""How sure a verdict is: raw evidence, and how often verdicts with such evidence were right.

The raw evidence of a verdict is the chance that what it says holds, were the steps independent:
that a cause gains more than the least that counts, and more than the next one; or, of "none", that
nothing does. It is lowered where little is known: by what the replay leaves unexplained, by few
steps, by ranks whose traces are missing, and where it hangs on one event. `CALIBRATION` turns it
into a confidence.
"""

from __future__ import annotations

from math import erf, sqrt

import numpy as np

from disttrain_cli.analysis.walk import Floats

#: What gains of two jobs that differ in nothing else differ by, as a share of a step, however many
#: the steps.
FLOOR = 0.005


def exceeds(shares: Floats, least: float) -> float:
    """The chance that the mean of `shares` [steps] would be above `least` in more such steps."""
    spread = sqrt(float(np.var(shares)) / len(shares) + FLOOR**2)
    return 0.5 + 0.5 * erf((float(shares.mean()) - least) / (spread * sqrt(2)))


def known(
    unexplained: float,
    steps: int,
    present: float = 1.0,
    unclassified: float = 0.0,
    repaired: float = 0.0,
) -> float:
    """Return a factor from 0 to 1 for the evidence of a job: by the share of a step that is
    unexplained, the number of steps, the share of ranks that are there, and the shares of kernels
    that are unclassified or repaired."""
    return (
        max(0.0, 1.0 - abs(unexplained))
        * (1.0 - 0.5**steps)
        * present
        * (1.0 - unclassified)
        * (1.0 - repaired)
    )


def calibrated(raw: float, kind: str) -> float:
    """How often verdicts with such evidence were right, on traces of this format."""
    evidence, right = zip(*CALIBRATION[kind], strict=True)
    return round(float(np.interp(raw, evidence, right)), 3)


#: By format, raw evidence and how often it was right, between which lines are drawn; from
#: `benchmarks.calibration`.
CALIBRATION: dict[str, tuple[tuple[float, float], ...]] = {
    "disttrain": ((0.0, 0.0), (0.405, 0.75), (0.575, 0.857), (0.761, 0.875), (0.939, 0.982)),
    "operations": ((0.0, 0.0), (0.653, 0.857), (0.999, 0.975)),
    "kineto": (
        (0.0, 0.0),
        (0.351, 0.848),
        (0.51, 0.957),
        (0.748, 0.964),
        (0.949, 0.988),
    ),
}
