"""Savings by `train.ordering`: `paper` for runs without ordering, and `best`.

For `paper`, the slots of every recorded step are put into the order of the interval rule
(`data.ordering.intervals`), by the times of their passes; the contents of a slot stay. A step that
was faster as recorded stays too. The policy also levels the microbatches themselves, which a trace
cannot show, so it saves more or less than this.

For `best`, batches drawn from the profile's sizes are simulated in the present and in the best
order, since a trace does not hold the sizes of all samples. So this holds for data like those that
were profiled, on devices as fast as the profile's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from disttrain_cli.analysis.graph import Graph
from disttrain_cli.analysis.job.remedies.replicas import memory_gib
from disttrain_cli.analysis.walk import Floats, Ints
from disttrain_cli.data.ordering.assigning import assign, count_costs
from disttrain_cli.data.ordering.best import Best
from disttrain_cli.data.ordering.intervals import interval_order
from disttrain_cli.data.sizes import sampled_batch, sizes_of_sample
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.spec.trace import Job

BATCHES = 4  # batches that are drawn
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


def best_share(job: Job) -> float | None:
    """Return the share of a step that the ordering `best` saves; None if it takes too long."""
    if job.predicted.ordering == "best":
        return 0.0
    if job.layout.microbatches > MOST_SLOTS:
        return None
    best = Best(job.profile, job.layout, job.gpus_per_node, memory_gib(job))
    inputs = job.profile.inputs
    sizes, now_s, then_s = sizes_of_sample(job.profile.data.sample), 0.0, 0.0
    for number in range(BATCHES):
        batch = sampled_batch(sizes, job.layout.global_batch_size, number)
        present = assign(
            count_costs(batch, inputs), job.layout, inputs.llm, job.predicted.ordering or "none"
        )
        now_s += simulate(best.pipeline(batch, present)).iteration_s
        then_s += simulate(best.pipeline(batch, best.order(batch))).iteration_s
    return 1 - then_s / now_s
