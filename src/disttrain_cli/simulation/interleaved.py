"""What interleaved 1F1B would bring, by formula: no such schedule is simulated, and no plan uses it yet.

With v virtual stages per rank a rank holds v short stages instead of a long one. While the pipeline of p stages
fills and drains, every rank of a unit waits for p - 1 others; that wait becomes v times shorter (Narayanan et al.
2021, section 2.2; DistTrain divides its warm-up by v). Messages, v times as many, are taken to be hidden.
"""

from __future__ import annotations


def interleaved_s(iteration_s: float, stages_s: list[float], virtual: int) -> float:
    """Time of an iteration with `virtual` stages per rank of one unit instead of one.

    Args:
        iteration_s: with one stage per rank.
        stages_s: one slot on each of the unit's stages, forward and backward.
        virtual: v; every stage must have at least that many layers.
    """
    wait_s = sum(stages_s) - max(stages_s)
    return iteration_s - wait_s * (1.0 - 1.0 / virtual)
