"""Playing recorded steps again with delays removed: what a step would take if…

A step is a graph: every pass (forward, backward or weights' part of one rank in one slot) starts
after the previous pass of its rank and after the passes it receives from:

    start = max(end of previous pass + handover, ends of sources) + transfer + load + gap

With every term as recorded this gives the recorded step back; the difference is reported as
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
    """Seconds of every pass, [passes, steps]; `update_s` [steps] follows the last pass of a
    step."""

    compute: Floats
    transfer: Floats
    handover: Floats
    load: Floats
    gap: Floats
    update: Floats


@dataclass(frozen=True)
class Passes:
    """Passes of a step: what each computes, where and for which slot."""

    rank: Ints
    slot: Ints
    operation: Ints  # place in `COMPUTE`
    unit: list[str]
    stage: Ints
    replica: Ints
    depth: Ints

    def groups(self, *columns: str) -> Ints:
        """A number per pass, equal where the columns are."""
        keys = [
            np.unique(np.asarray(getattr(self, column)), return_inverse=True)[1]
            for column in columns
        ]
        return (
            np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
        )


@dataclass(frozen=True)
class Graph(Passes):
    """Passes of a step in the order of `walk`, with what was recorded of them."""

    walk: Walk
    steps: Ints
    predicted: Floats  # [passes, steps] seconds that the profile expects for the recorded work
    recorded: Delays
    window: Floats  # [steps]
    devices: dict[str, float]  # unit → devices for which one of its ranks stands
    late: Floats  # [passes, steps] part of `recorded.gap` in which a rehearsal's own host was late
    # [passes, steps] part of `recorded.compute` in exchanges with a TP or CP group; NaN: not known
    exchanged: Floats
    # [passes] seconds that the profile expects a transfer to take; infinite where it does not say
    expected: Floats
    # that it expects of reduction and optimizer after the last pass; infinite likewise
    expected_update_s: float
    # [passes] group of ranks without a trace (`lost`) that may have sent what a pass waits for; -1:
    # none
    unheard: Ints
    lost: list[list[tuple[str, int, int]]]  # unit, stage and replica of the ranks of each group
    crowded: float  # compute of all ranks ÷ (window × cores) where they share cores, else 0

    def replay(self, delays: Delays) -> Floats:
        """Seconds of every step [steps] with these delays."""
        after_sources = delays.transfer + delays.load + delays.gap + delays.compute
        return self.walk.ends(after_sources, delays.handover).max(axis=0) + delays.update

    def without_delays(self) -> Delays:
        """As recorded, but transfers as they should be, and no waits for data or host.

        A transfer takes the median of its unit and operation, or what the profile expects of its
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
        """Passes by the cut that they receive over, named by the stage before it; those that
        receive nothing by theirs.
        """
        cuts: dict[tuple[str, int], list[int]] = {}
        for index, feeding in enumerate(self.walk.sources):
            before = int(feeding[0]) if len(feeding) and self.operation[index] == FORWARD else index
            cuts.setdefault((self.unit[before], int(self.stage[before])), []).append(index)
        return cuts

    def links(self, values: Floats) -> dict[tuple[str, int], float]:
        """Sums per step by the cut that the passes received over."""
        fed = np.array([len(feeding) > 0 for feeding in self.walk.sources])
        sums = values.mean(axis=1) * fed
        return {
            cut: float(sums[nodes].sum()) for cut, nodes in self.cuts().items() if fed[nodes].any()
        }


def group_mean(values: Floats, groups: Ints) -> Floats:
    """Each pass's mean over its group and all steps, [passes, steps]."""
    sums, sizes = np.bincount(groups, values.sum(axis=1)), np.bincount(groups) * values.shape[1]
    return np.repeat((sums / np.maximum(1, sizes))[groups, None], values.shape[1], axis=1)


def _per_group(values: Floats, groups: Ints, statistic: Any) -> Floats:
    out = np.empty_like(values)
    for group in np.unique(groups):
        out[groups == group] = statistic(values[groups == group])
    return out
