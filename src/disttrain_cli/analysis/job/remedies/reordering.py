"""Recorded steps with their slots in another order: what `train.ordering: paper` would gain a run
that orders nothing.

The slots of every step are put into the order of the interval rule (`data.ordering.intervals`), by
what their passes took; what is in a slot stays. A step that was faster as recorded stays too. The
policy also levels the microbatches themselves, which cannot be told from a trace, so it gains more
or less than this.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from disttrain_cli.analysis.graph import Graph
from disttrain_cli.analysis.walk import Floats, Ints
from disttrain_cli.data.ordering.intervals import interval_order

MOST_SLOTS = 128  # of longer steps the order takes too long to find


def reordered_s(graph: Graph) -> Floats | None:
    """Seconds of every step [steps] with its slots reordered; None where they are too many or too
    few."""
    slots = int(graph.slot.max()) + 1
    if not 2 < slots <= MOST_SLOTS:
        return None
    compute, lanes = graph.recorded.compute, graph.groups("rank", "operation")
    at = np.full((lanes.max() + 1, slots), -1, dtype=np.int64)  # by rank and operation, and slot
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
    """What every slot takes on every stage, all passes, of its slowest replica [steps,
    slots, stages]."""
    both = np.zeros((int(graph.rank.max()) + 1, slots, len(graph.steps)))
    np.add.at(both, (graph.rank, graph.slot), graph.recorded.compute)
    costs_ns = np.zeros((int(graph.depth.max()) + 1, slots, len(graph.steps)))
    ranks, first = np.unique(graph.rank, return_index=True)
    np.maximum.at(costs_ns, graph.depth[first], both[ranks])
    return np.round(1e9 * costs_ns.transpose(2, 1, 0)).astype(np.int64)
