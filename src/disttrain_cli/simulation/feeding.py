"""Data of the slots as replicas pull them: a bounded queue and one line of workers for each replica
(`data/loader.py`).

Slots are numbered through all steps. When a replica asks for slot j, the slots up to j + prefetch
are handed to its workers, who prepare one after the other:

    ready[j] = max(ready[j - 1], asked[j - prefetch]) + load_s[j]

It asks for a slot when its rank is free and the slot's tensors have arrived, and computes once the
data are there. The first prefetch + 1 slots are handed over at the start of the first step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from disttrain_cli.simulation.timeline import Floats, Pipeline


class Feed:
    """The workers of all replicas of one stage, through consecutive steps; times from the start of
    the present one."""

    def __init__(self, stage: int, replicas: int, slots: int, prefetch: int) -> None:
        self.stage, self._slots, self._prefetch = stage, slots, prefetch
        self._ready = np.zeros(replicas)  # when the workers have done all that they were asked for
        # when they get each slot of this step and later
        self._handed = np.full((slots + prefetch, replicas), np.inf)
        self._handed[: prefetch + 1] = 0.0
        self._load_s: Floats  # [n, R] of the present step
        self.wait_s: Floats  # [n, R] how long its data have kept the replicas waiting

    def begin_step(self, pipeline: Pipeline) -> None:
        """Take the step's own times; before its first `fetch`."""
        assert pipeline.load_s is not None
        self._load_s = pipeline.load_s[:, self.stage, : self._handed.shape[1]]
        self.wait_s = np.zeros_like(self._load_s)

    def fetch(self, slot: int, asked: Floats) -> Floats:
        """[R] when the replicas have a slot's data, for which they ask at `asked`; slots in
        order."""
        later = self._handed[slot + self._prefetch]
        # the very first ones were handed over before anyone asked
        np.minimum(later, asked, out=later)
        np.maximum(self._ready, self._handed[slot], out=self._ready)
        self._ready += self._load_s[slot]
        begins = np.maximum(asked, self._ready)
        self.wait_s[slot] = begins - asked
        return begins

    def end_step(self, iteration_s: float) -> None:
        """Go on to the next step, which begins `iteration_s` after this one."""
        self._ready -= iteration_s
        known = self._handed[self._slots :] - iteration_s
        self._handed = np.full_like(self._handed, np.inf)
        self._handed[: self._prefetch] = known


def feeds_of(pipelines: Sequence[Pipeline]) -> list[Feed]:
    """Feeds of the stages for which something is prepared in any of these steps of one layout."""
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
    """[n, S, R] how long each slot's data kept its replica waiting; NaN for replicas that do not
    exist."""
    waits_s = np.where(pipeline.present, np.zeros_like(pipeline.forward_s), np.nan)
    for feed in feeds:
        waits_s[:, feed.stage, : pipeline.replicas[feed.stage]] = feed.wait_s
    return waits_s
