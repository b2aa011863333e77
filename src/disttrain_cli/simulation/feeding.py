"""Loading of the slots' data: a bounded queue and a line of workers per replica (`data/loader.py`).

Slots are numbered through all steps. When a replica requests slot j, the slots up to j + prefetch
are submitted to its workers, which prepare one after the other:

    ready[j] = max(ready[j - 1], asked[j - prefetch]) + load_s[j]

It requests a slot when its rank is free and the slot's tensors have arrived, and computes once the
data are ready. The first prefetch + 1 slots are submitted at the start of the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from disttrain_cli.simulation.timeline import Floats, Pipeline


class Feed:
    """Workers of all replicas of one stage, through consecutive steps.

    Times count from the start of the current step.
    """

    def __init__(self, stage: int, replicas: int, slots: int, prefetch: int) -> None:
        self.stage, self._slots, self._prefetch = stage, slots, prefetch
        self._ready = np.zeros(replicas)  # when the workers have finished all submitted slots
        # when each slot of this step and later is submitted
        self._handed = np.full((slots + prefetch, replicas), np.inf)
        self._handed[: prefetch + 1] = 0.0
        self._load_s: Floats  # [n, R] of the current step
        self.wait_s: Floats  # [n, R] time that the replicas wait for a slot's data

    def begin_step(self, pipeline: Pipeline) -> None:
        """Set the step's preparation times; call it before the first `fetch`."""
        assert pipeline.load_s is not None
        self._load_s = pipeline.load_s[:, self.stage, : self._handed.shape[1]]
        self.wait_s = np.zeros_like(self._load_s)

    def fetch(self, slot: int, asked: Floats) -> Floats:
        """Return [R] when the replicas have a slot's data, requested at `asked`; slots in order."""
        later = self._handed[slot + self._prefetch]
        # the first slots were submitted before any request
        np.minimum(later, asked, out=later)
        np.maximum(self._ready, self._handed[slot], out=self._ready)
        self._ready += self._load_s[slot]
        begins = np.maximum(asked, self._ready)
        self.wait_s[slot] = begins - asked
        return begins

    def end_step(self, iteration_s: float) -> None:
        """Advance to the next step, which begins `iteration_s` after this one."""
        self._ready -= iteration_s
        known = self._handed[self._slots :] - iteration_s
        self._handed = np.full_like(self._handed, np.inf)
        self._handed[: self._prefetch] = known


def feeds_of(pipelines: Sequence[Pipeline]) -> list[Feed]:
    """Return feeds of the stages with data preparation in any of these steps of one layout."""
    first = pipelines[0]
    # by step, [S]
    loads = [one.load_s.any(axis=(0, 2)) for one in pipelines if one.load_s is not None]
    if not loads:
        return []
    assert len(loads) == len(pipelines) and all(one.prefetch == first.prefetch for one in pipelines)
    return [
        Feed(stage, int(first.replicas[stage]), len(first.forward_s), first.prefetch)
        for stage in np.flatnonzero(np.any(loads, axis=0)).tolist()
    ]


def load_waits_s(pipeline: Pipeline, feeds: Sequence[Feed]) -> Floats:
    """Return [n, S, R] each replica's wait for a slot's data; NaN for absent replicas."""
    waits_s = np.where(pipeline.present, np.zeros_like(pipeline.forward_s), np.nan)
    for feed in feeds:
        waits_s[:, feed.stage, : pipeline.replicas[feed.stage]] = feed.wait_s
    return waits_s
