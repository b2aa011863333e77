"""Replay engine: the end of every node of a dependency graph, for all steps side by side.

    end = max(end of the one before on its rank + lag, ends of its sources) + time

The sources that feed a node may differ from step to step.

A graph is walked level by level; the nodes of a level depend on earlier levels only. `job.graph`
builds such a graph from disttrain's traces, `study.graph` from operation-level ones.
"""

from __future__ import annotations

import graphlib
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Feeds = NDArray[np.bool_]


@dataclass(frozen=True)
class Level:
    """Nodes that depend on earlier levels only.

    Many nodes have the same sources, so each set of sources is evaluated once.
    """

    nodes: slice
    fed: Ints  # nodes with sources, counted from the level's first
    set_of: Ints  # index of the set of sources of each of these
    starts: Ints  # offset of each set in `sources`
    sources: Ints  # the sets, concatenated
    # [sources, steps] −∞ in steps in which a source does not feed, else 0; None: all always feed
    absent: Floats | None


@dataclass(frozen=True)
class Walk:
    """A graph in topological order; all indices are those of this order."""

    node: Ints  # original index of each node
    previous: Ints  # previous node on its rank, -1 = none
    sources: list[Ints]
    # by node [its sources, steps]: True if it waits for a source in a step; None: always
    feeds: list[Feeds] | None
    levels: list[Level]

    def ends(self, time: Floats, lag: Floats | None = None) -> Floats:
        """Return the end of every node, [nodes, steps].

        Args:
            time: seconds that each node takes [nodes, steps].
            lag: seconds that each waits after the node before it on its rank; None: 0.
        """
        end = np.zeros((len(time) + 1, time.shape[1]))  # the last row: end of "no previous node"
        for level in self.levels:
            ready = end[self.previous[level.nodes]]
            if lag is not None:
                ready += lag[level.nodes]
            if len(level.fed):
                ends = (
                    end[level.sources]
                    if level.absent is None
                    else end[level.sources] + level.absent
                )
                latest = np.maximum.reduceat(ends, level.starts, axis=0)
                ready[level.fed] = np.maximum(ready[level.fed], latest[level.set_of])
            end[level.nodes] = ready + time[level.nodes]
        return end[:-1]


def walk_of(previous: Ints, sources: list[Ints], feeds: list[Feeds] | None = None) -> Walk | None:
    """Sort a graph topologically; return None if it has a cycle.

    Args:
        previous: by node the previous one on its rank, -1 = none.
        sources: by node the nodes that it waits for.
        feeds: by node [its sources, steps], True in steps in which it waits; None: in all.
    """
    count = len(previous)
    sorter = graphlib.TopologicalSorter(
        {
            node: [*sources[node].tolist(), *([int(previous[node])] if previous[node] >= 0 else [])]
            for node in range(count)
        }
    )
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return None
    ready_sets: list[tuple[int, ...]] = []
    while sorter.is_active():
        ready_sets.append(sorter.get_ready())
        sorter.done(*ready_sets[-1])
    former = np.array([node for ready in ready_sets for node in ready], dtype=np.int64)
    number = np.empty(count, dtype=np.int64)
    number[former] = np.arange(count)
    moved = np.array(
        [number[previous[node]] if previous[node] >= 0 else -1 for node in former], dtype=np.int64
    )
    fed_by = [number[sources[node]] for node in former]
    fed_in = None if feeds is None else [feeds[node] for node in former]
    first = np.concatenate([[0], np.cumsum([len(ready) for ready in ready_sets])]).tolist()
    levels = [
        _level(slice(*ends), fed_by[slice(*ends)], None if fed_in is None else fed_in[slice(*ends)])
        for ends in itertools.pairwise(first)
    ]
    return Walk(former, moved, fed_by, fed_in, levels)


def _level(nodes: slice, sources: list[Ints], feeds: list[Feeds] | None) -> Level:
    fed = [index for index, sources_of in enumerate(sources) if len(sources_of)]
    names = [
        sources[index].tobytes() + (b"" if feeds is None else feeds[index].tobytes())
        for index in fed
    ]
    sets = dict(zip(names, fed, strict=True))  # one node of each set
    numbers = {name: number for number, name in enumerate(sets)}
    members = [sources[index] for index in sets.values()]
    always = feeds is None or all(feeds[index].all() for index in sets.values())
    return Level(
        nodes=nodes,
        fed=np.array(fed, dtype=np.int64),
        set_of=np.array([numbers[name] for name in names], dtype=np.int64),
        starts=np.cumsum([0, *(len(sources_of) for sources_of in members)])[:-1],
        sources=np.concatenate([*members, np.empty(0, dtype=np.int64)]),
        absent=None
        if feeds is None or always
        else np.concatenate([np.where(feeds[index], 0.0, -np.inf) for index in sets.values()]),
    )
