"""Saving by `train.ordering: paper` for runs without ordering: recorded steps, slots reordered.

The slots of every step are put into the order of the interval rule (`data.ordering.intervals`), by
the times of their passes; the contents of a slot stay. A step that was faster as recorded stays
too. The policy also levels the microbatches themselves, which a trace cannot show, so it saves more
or less than this.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from disttrain_cli.analysis.graph import Graph
from disttrain_cli.analysis.walk import Floats, Ints
from disttrain_cli.data.ordering.intervals import interval_order

MOST_SLOTS = 128  # for more slots the order takes too long to find


def reordered_s(graph: Graph) -> Floats | None:
    """Return the seconds of every step [steps] with reordered slots.

    It is None if there are too many slots or too few.
    """
    slots = int(graph.slot.max()) + 1
    if not 2 < slots <= MOST_SLOTS:
        return None
    compute, lanes = graph.recorded.compute, graph.groups("rank", "operation")
    at = np.full((lanes.max() + 1, slots), -1, dtype=np.int64)  # [rank and operation, slot] pass
    at[lanes, graph.slot] = np.arange(len(lanes))
    if (at < 0).any():
        return None
    costs = _stage_costs_ns(graph, slots)
    # [slots, steps]
    orders = np.stack([interval_order(costs[step]) for step in range(len(graph.steps))], axis=1)
    source = at[lanes[:, None], orders[graph.slot]]  # [passes, steps]
    moved = replace(graph.recorded, compute=np.take_along_axis(compute, source, axis=0))
    return np.minimum(graph.replay(moved), graph.replay(graph.recorded))


def _stage_costs_ns(graph: Graph, slots: int) -> Ints:
    """Return the time of every slot on every stage, all passes of its slowest replica.

    The shape is [steps, slots, stages].
    """
    both = np.zeros((int(graph.rank.max()) + 1, slots, len(graph.steps)))
    np.add.at(both, (graph.rank, graph.slot), graph.recorded.compute)
    costs_ns = np.zeros((int(graph.depth.max()) + 1, slots, len(graph.steps)))
    ranks, first = np.unique(graph.rank, return_index=True)
    np.maximum.at(costs_ns, graph.depth[first], both[ranks])
    return np.round(1e9 * costs_ns.transpose(2, 1, 0)).astype(np.int64)
