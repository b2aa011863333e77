"""Slow ranks inside TP, CP and EP groups, whose passes are equally long whichever rank is slow.

The ranks of a group wait for each other in its collectives, so the time of a pass outside of them
is the rank's local time. The rank with most local time in a step delays the others by its
difference to the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.causes import State, Suspect
from disttrain_cli.analysis.graph import Graph
from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.analysis.suspects import by_rank
from disttrain_cli.analysis.walk import Floats, Ints
from disttrain_cli.spec.trace import WEIGHTS


def held_up(graph: Graph) -> Floats:
    """Return the share of every pass, [passes, steps], by which its rank delayed its group.

    Single slow passes do not count: the share is at most that of the rank's median pass in this
    step, so 0 for all but one rank of a group. It is also 0 if collectives were not recorded.
    """
    compute = graph.recorded.compute
    lead = np.zeros_like(compute)
    if np.isnan(graph.exchanged).all():
        return lead
    own, steps = compute - graph.exchanged, np.arange(len(graph.steps))
    for members in _members(graph.groups("depth", "waiting", "operation", "slot")):
        if len(members) > 1:
            ordered = np.sort(own[members], axis=0)
            others = np.repeat(ordered[-1:], len(members), axis=0)
            others[own[members].argmax(axis=0), steps] = ordered[-2]
            lead[members] = (own[members] - others) / np.maximum(compute[members], 1e-12)
    lead = np.nan_to_num(lead)
    for members in _members(graph.rank):
        lead[members] = np.minimum(lead[members], np.median(lead[members], axis=0))
    return lead.clip(0.0, 1.0)


def _members(groups: Ints) -> Iterator[Ints]:
    """Yield the indices of every group's members."""
    order = np.argsort(groups, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


def of_groups(graph: Graph, share: Floats, where: Mapping[int, Place]) -> list[Suspect]:
    """Return ranks that delay their groups; without the fault they are as fast as the next slowest.

    Args:
        graph: recorded steps.
        share: `held_up` of the graph.
        where: location by rank.
    """

    def mend(pick: NDArray[np.bool_]) -> Callable[[State], State]:
        factor = without(graph, np.where(pick[:, None], share, 0.0))
        return lambda state: (state[0] * factor, *state[1:])

    return by_rank("worker", graph.rank, where, graph.recorded.compute * share, mend)


def without(graph: Graph, share: Floats) -> Floats:
    """Return the factor of every pass once one rank no longer delays its group.

    It applies to the passes of all ranks of the group; for weight gradients, which have no
    collectives, only to the rank's own.
    """
    groups = graph.groups("depth", "waiting", "operation", "slot")
    most = np.zeros((groups.max() + 1, share.shape[1]))
    np.maximum.at(most, groups, share)
    alone = (graph.operation == WEIGHTS)[:, None]
    return 1 - np.where(alone, share, most[groups])


def share_waited_for(graph: Graph, share: Floats) -> dict[int, float]:
    """Return, for ranks that delay their groups, the share of their passes by which they do."""
    return {
        int(rank): float(of_rank.mean())
        for rank in np.unique(graph.rank[share.any(axis=1)])
        if (of_rank := share[graph.rank == rank]).any()
    }
