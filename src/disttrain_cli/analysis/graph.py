"""Replay of recorded steps without some of their delays.

A step is a graph: every pass (forward, backward or weight gradients of one rank in one slot) starts
after the previous pass of its rank and after the passes that it receives from:

    start = max(end of previous pass + handover, ends of sources) + transfer + load + gap

With every term as recorded this reproduces the recorded step; the difference is reported as
unexplained. Steps share one graph, so a replay is one walk over it (`walk`) with all steps side by
side [passes, steps].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from disttrain_cli.analysis.walk import Floats, Ints, Walk
from disttrain_cli.spec.trace import FORWARD


@dataclass(frozen=True)
class Delays:
    """Seconds of every pass, [passes, steps]; `update` [steps] follows the last pass of a step."""

    compute: Floats
    transfer: Floats
    handover: Floats
    load: Floats
    gap: Floats
    update: Floats


@dataclass(frozen=True)
class Passes:
    """Passes of a step: rank, slot, operation, unit, stage, replica and depth of each."""

    rank: Ints
    slot: Ints
    operation: Ints  # index in `COMPUTE`
    unit: list[str]
    stage: Ints
    replica: Ints
    depth: Ints

    def groups(self, *columns: str) -> Ints:
        """Number the passes so that numbers are equal if all `columns` are."""
        keys = [
            np.unique(np.asarray(getattr(self, column)), return_inverse=True)[1]
            for column in columns
        ]
        return (
            np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
        )


@dataclass(frozen=True)
class Graph(Passes):
    """Passes of a step in the order of `walk`, with their recorded times."""

    walk: Walk
    steps: Ints
    predicted: Floats  # [passes, steps] seconds that the profile predicts for the recorded work
    recorded: Delays
    window: Floats  # [steps]
    devices: dict[str, float]  # unit → devices that one of its ranks represents
    # [passes, steps] part of `recorded.gap` due to start delays of a rehearsal's own host
    late: Floats
    # [passes, steps] part of `recorded.compute` in TP, CP or EP collectives; NaN: unknown
    exchanged: Floats
    # [passes] number in its stage of the ranks that wait for each other: a replica's, or those of
    # neighbouring replicas with one EP group
    waiting: Ints
    # [passes] seconds that the profile predicts for a transfer; infinite if it has none
    expected: Floats
    # seconds that it predicts for reduction and optimizer after the last pass; infinite likewise
    expected_update_s: float
    # [passes] index in `lost` of ranks without a trace that may have sent the input of a pass; -1:
    # none
    unheard: Ints
    lost: list[list[tuple[str, int, int]]]  # unit, stage and replica of the ranks of each group
    crowded: float  # compute of all ranks ÷ (window × cores) if they share cores, else 0

    def replay(self, delays: Delays) -> Floats:
        """Return the seconds of every step [steps] with these delays."""
        after_sources = delays.transfer + delays.load + delays.gap + delays.compute
        return self.walk.ends(after_sources, delays.handover).max(axis=0) + delays.update

    def without_delays(self) -> Delays:
        """Return the recorded delays with ideal transfers and no waits for data or host.

        A transfer takes the median of its unit and operation, or what the profile predicts for its
        link, if that is less; so does the end of the step.
        """
        recorded = self.recorded
        groups = self.groups("unit", "operation")
        none = np.zeros_like(recorded.load)
        return replace(
            recorded,
            transfer=np.minimum(
                _per_group(recorded.transfer, groups, np.median), self.expected[:, None]
            ),
            handover=_per_group(recorded.handover, groups, np.median),
            load=none,
            gap=none,
            update=np.full_like(
                recorded.update, min(np.median(recorded.update), self.expected_update_s)
            ),
        )

    def cuts(self) -> dict[tuple[str, int], list[int]]:
        """Return the passes of each cut that they receive over.

        A cut is named by the unit and stage before it; passes that receive nothing are under their
        own unit and stage.
        """
        cuts: dict[tuple[str, int], list[int]] = {}
        for index, feeding in enumerate(self.walk.sources):
            before = int(feeding[0]) if len(feeding) and self.operation[index] == FORWARD else index
            cuts.setdefault((self.unit[before], int(self.stage[before])), []).append(index)
        return cuts

    def links(self, values: Floats) -> dict[tuple[str, int], float]:
        """Sum values per step over the passes that receive over each cut."""
        fed = np.array([len(feeding) > 0 for feeding in self.walk.sources])
        sums = values.mean(axis=1) * fed
        return {
            cut: float(sums[nodes].sum()) for cut, nodes in self.cuts().items() if fed[nodes].any()
        }


def group_mean(values: Floats, groups: Ints) -> Floats:
    """Return each pass's mean over its group and all steps, [passes, steps]."""
    sums, sizes = np.bincount(groups, values.sum(axis=1)), np.bincount(groups) * values.shape[1]
    return np.repeat((sums / np.maximum(1, sizes))[groups, None], values.shape[1], axis=1)


def _per_group(values: Floats, groups: Ints, statistic: Any) -> Floats:
    out = np.empty_like(values)
    for group in np.unique(groups):
        out[groups == group] = statistic(values[groups == group])
    return out
