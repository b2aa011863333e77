"""New plan for the recorded job, on as many devices or fewer, with costs corrected by the trace.

It estimates the saving of `disttrain profile --calibrate RUN && disttrain plan`: the profile's
times are scaled, unit by unit, forward and backward, to those of typical ranks for the recorded
work, and the planner's best layouts and the present one are simulated on the same global batch,
drawn from the profile's sizes and ordered as in training; with split backwards if the recorded job
has them.

The planner itself simulates more layouts and more batches, so this saving is a lower bound of what
it will find; it knows no slow rank and no waits, which stay as they are. Drift of the data is not
considered (`job.staleness` does). It takes 0.1 to 0.4 s; 0.7 s for a model of 72B parameters on
1,296 GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from disttrain_cli.analysis.graph import Graph
from disttrain_cli.analysis.job.remedies.replicas import Record, memory_gib
from disttrain_cli.analysis.losses import Explained
from disttrain_cli.errors import InfeasibleError
from disttrain_cli.spec.layer_costs import LayerShard, combine
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.trace import BACKWARD, FORWARD, WEIGHTS, Job

if TYPE_CHECKING:
    from disttrain_cli.planning.units import Cluster

# candidates of the search, with any number of the LLM's replicas, and with no more than there are
TRIED = 3


class Replanned(NamedTuple):
    """A layout and the seconds per step of it and of the present one, with the corrected costs."""

    layout: Layout
    present_s: float
    then_s: float


def replan(record: Record, why: Explained, gpus: int | None = None) -> Replanned | None:
    """Return the best of the planner's layouts, which may be the present one; None if none fits.

    The layouts have a unit for each module or the job's own units. It is also None if the profile
    lacks what the planner needs.

    Args:
        record: recorded steps.
        why: `explain` of the recorded passes.
        gpus: number of devices; None: as many as the job has.
    """
    job = record.job
    if not _complete(job.profile):
        return None
    from disttrain_cli.planning.finalists import grouping, one_batch_s
    from disttrain_cli.planning.search import search
    from disttrain_cli.planning.solve import fewer_replicas, layout_of, ranked_as
    from disttrain_cli.planning.split_backward import timed
    from disttrain_cli.planning.units import groupings, units_of

    profile, cluster = corrected(record, why), ranked_as(cluster_of(job))
    present_s = one_batch_s(profile, job.layout, cluster)
    if gpus is not None:
        cluster = replace(cluster, gpus=gpus, gpus_per_node=min(cluster.gpus_per_node, gpus))
    llm = job.layout.unit_of(profile.inputs.llm)
    try:
        groups = groupings(profile, cluster, "disaggregated")
    except InfeasibleError:
        return None
    if grouping(job.layout.units) != grouping(groups[0]):
        groups = [units_of(profile, cluster, job.layout), *groups]
    layouts = [
        layout_of(units, cluster, candidate, "auto")
        for units in groups
        for candidate in dict.fromkeys(
            candidate
            for keep in (None, fewer_replicas(units, llm.dp))
            for candidate in search(units, cluster, TRIED, keep=keep).best
        )
    ]
    found = [timed(profile, cluster, layout) for layout in layouts]
    found += [(job.layout, present_s)] if job.layout.gpus_used <= cluster.gpus else []
    if not found:
        return None
    layout, then_s = min(found, key=lambda pair: pair[1])
    return Replanned(layout, present_s, then_s)


def can_replan(record: Record | None) -> bool:
    """Return True if the planner can predict other layouts."""
    return record is not None and _complete(record.job.profile)


def _complete(profile: Profile) -> bool:
    """Return True if the profile knows where the work of every module comes from."""
    inputs = profile.inputs
    return set(profile.modules) <= {inputs.llm, *(head.module for head in inputs.heads)}


def cluster_of(job: Job) -> Cluster:
    """Return the constraints of a layout: the job's devices and choices, as far as recorded."""
    from disttrain_cli.planning.units import Cluster

    layout, cpu = job.layout, job.profile.device.kind == "cpu"
    recomputed = {unit.checkpointing for unit in layout.units}
    return Cluster(
        gpus=layout.gpus_used,
        gpus_per_node=min(job.gpus_per_node, layout.gpus_used),
        memory_gib=memory_gib(job),
        zero_stage=layout.zero_stage,
        batch=layout.global_batch_size,
        trained=None if layout.trained is None else tuple(layout.trained),
        ordering=job.predicted.ordering or "paper",
        most_tp=1 if cpu else None,
        most_cp=1 if cpu else None,
        most_ep=1 if cpu else None,
        splits=layout.overlap or any(unit.weight_delay for unit in layout.units),
        overlaps=layout.overlap,
        hides=any(unit.tp_overlap or unit.ep_overlap for unit in layout.units),
        checkpointing="auto" if len(recomputed) > 1 else "full" if True in recomputed else "none",
    )


def corrected(record: Record, why: Explained) -> Profile:
    """Return the profile with layer times scaled, by unit, to the typical ranks' recorded times."""
    profile = record.job.profile
    modules = dict(profile.modules)
    for unit in record.job.layout.units:
        factors = factors_of(unit.name, record.graph, why)
        for name in unit.modules:
            costs = {
                kind: cost.model_copy(
                    update={"tp": {tp: _scaled(shard, factors) for tp, shard in cost.tp.items()}}
                )
                for kind, cost in modules[name].costs.items()
            }
            modules[name] = modules[name].model_copy(update={"costs": costs})
    return profile.model_copy(update={"modules": modules})


def factors_of(unit: str, graph: Graph, why: Explained) -> list[float]:
    """Return, by operation, the recorded time of a unit's passes over their predicted time."""
    factors: list[float] = []
    for operation in (FORWARD, BACKWARD, WEIGHTS):
        mask = (np.asarray(graph.unit) == unit) & (graph.operation == operation)
        expected = float(graph.predicted[mask].sum())
        usual = factors[-1] if operation == WEIGHTS else 1.0
        factors.append(float(why.staged[mask].sum()) / expected if expected else usual)
    return factors


def _scaled(shard: LayerShard, factors: list[float]) -> LayerShard:
    """Scale the times of a layer by a factor for each operation.

    `backward_ms` includes the weight gradients.
    """
    forward, backward, weights = factors
    return shard.model_copy(
        update={
            "forward_ms": combine((forward, shard.forward_ms)),
            "backward_ms": combine(
                (backward, shard.backward_ms), (weights - backward, shard.weight_ms)
            ),
            "backward_input_ms": combine((backward, shard.backward_input_ms)),
            "weight_ms": combine((weights, shard.weight_ms)),
            "hidden_ms": {
                name: combine((forward if name == "forward" else backward, hidden))
                for name, hidden in shard.hidden_ms.items()
            },
        }
    )
