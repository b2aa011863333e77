"""Saving by `train.ordering: best`: sampled batches, simulated in the present and the best order.

The batches are drawn from the profile's sizes. The recorded samples themselves cannot be reordered,
since a trace does not hold the sizes of all of them. So this holds for data like those that were
profiled, on devices as fast as the profile's.
"""

from __future__ import annotations

from disttrain_cli.analysis.job.remedies.reordering import MOST_SLOTS
from disttrain_cli.analysis.job.remedies.replicas import memory_gib
from disttrain_cli.data.ordering.assigning import assign, count_costs
from disttrain_cli.data.ordering.best import Best
from disttrain_cli.data.sizes import sampled_batch, sizes_of_sample
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.spec.trace import Job

BATCHES = 4  # batches that are drawn


def best_share(job: Job) -> float | None:
    """Return the share of a step that the ordering `best` saves; None if it takes too long."""
    if job.predicted.ordering == "best":
        return 0.0
    if job.layout.microbatches > MOST_SLOTS:
        return None
    best, inputs = (
        Best(job.profile, job.layout, job.gpus_per_node, memory_gib(job)),
        job.profile.inputs,
    )
    sizes, now_s, then_s = sizes_of_sample(job.profile.data.sample), 0.0, 0.0
    for number in range(BATCHES):
        batch = sampled_batch(sizes, job.layout.global_batch_size, number)
        present = assign(
            count_costs(batch, inputs), job.layout, inputs.llm, job.predicted.ordering or "none"
        )
        now_s += simulate(best.pipeline(batch, present)).iteration_s
        then_s += simulate(best.pipeline(batch, best.order(batch))).iteration_s
    return 1 - then_s / now_s
