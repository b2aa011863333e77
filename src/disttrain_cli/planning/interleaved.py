"""Megatron's virtual pipeline stages (`schedule.interleaved`), for layouts of one unit.

A device holds several chunks of layers instead of one stage. The layers are cut into PP · v chunks,
so that the pipeline fills and drains in v times smaller steps: for equal chunks the bubble is
(PP - 1) / (v · n) of the ideal time, for v times as many messages. Costs are those of chunks as
stages (`costs.layout`), between their actual devices; reductions and gathers overlap with the
passes of their chunk, one chunk's after the other's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from disttrain_cli.costs.layout import amount, stages_of
from disttrain_cli.costs.memory import fits
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.partition import split
from disttrain_cli.planning.predict import batches
from disttrain_cli.planning.units import Cluster
from disttrain_cli.simulation.makespan import steps_s
from disttrain_cli.simulation.step import pipelines_of
from disttrain_cli.spec.plan import Baseline, Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile.train import Ordering

CHUNKS = (2, 4, 8)  # chunks per device that are tried


def interleaved_s(
    profile: Profile,
    layout: Layout,
    cluster: Cluster,
    draws: Draws,
    chunks: int,
    numbers: Iterable[int] | None = None,
    ordering: Ordering | None = None,
) -> float:
    """Return the mean step time of a layout of one unit with `chunks` chunks per device.

    Over these global batches drawn from the data, or over all, ordered by the policy of the draws
    or by another; with one chunk as `predict.simulated_s`. Inf if there is no such schedule or it
    does not fit: PP is 1, slots are not a multiple of it, chunks exceed layers, or slots in flight
    need more than a device's memory.
    """
    cut = layout if chunks == 1 else cut_into(profile, layout, chunks)
    if cut is None or not fits(profile, cut, cluster.memory_gib):
        return math.inf
    loads = [
        draws.loads(layout, number, ordering)
        for number in (batches(cluster) if numbers is None else numbers)
    ]
    stages = stages_of(profile, cut)
    return float(steps_s(pipelines_of(profile, cut, stages, loads, cluster.gpus_per_node)).mean())


def with_chunks(
    profile: Profile,
    cluster: Cluster,
    draws: Draws,
    layouts: Sequence[Layout],
    found: Baseline,
) -> Baseline:
    """Return a baseline, or one of these layouts with virtual stages, whichever is faster.

    A plan has no virtual stages unless they are written by hand (`UnitPlan.chunks`). They are
    chosen by the policy of the draws, and timed by the better of that and the cluster's, on the
    batches of `found`.
    """
    times_s = {
        (interleaved_s(profile, layout, cluster, draws, chunks), number, chunks)
        for number, layout in enumerate(layouts)
        for chunks in CHUNKS
    }
    chosen_s, number, chunks = min(times_s)
    if not math.isfinite(chosen_s):
        return found
    best_s = min(
        interleaved_s(profile, layouts[number], cluster, draws, chunks, ordering=ordering)
        for ordering in (None, cluster.ordering)
    )
    if best_s >= found.iteration_s:
        return found
    layout, faster = layouts[number], found.iteration_s / best_s
    return Baseline(
        iteration_s=best_s,
        sequences_per_s=faster * found.sequences_per_s,
        mfu=faster * found.mfu,
        gpus_used=layout.gpus_used,
        layout=f"{layout.describe()}, M {layout.microbatch_size}, {chunks} chunks per device",
    )


def cut_into(profile: Profile, layout: Layout, chunks: int) -> Layout | None:
    """Return the layout with so many stages on each rank, the slowest of them minimised.

    Modules replicated over TP (`module_tp`) are not cut. None if there is no such schedule.
    """
    (unit,) = layout.units
    count = unit.pp * chunks
    blocks: list[int] = []  # layers that stay together
    for name in unit.modules:
        depth = len(profile.modules[name].layers)
        blocks += [depth] if name in unit.module_tp else [1] * depth
    if unit.pp == 1 or layout.microbatches % unit.pp or count > len(blocks):
        return None
    alone = unit.model_copy(update={"dp": 1})
    times: list[float] = []
    for stage in stages_of(profile, _staged(layout, alone, blocks)):
        (cost,) = stage.costs
        replica = profile.modules[cost.module].work_per_sequence.scaled(layout.microbatch_size)
        work = replica.scaled(1 / unit.dealt_over(cost.module))
        parts = cost.forward_ms + cost.backward_ms
        times.append(float(amount(parts, np.array([[work]]))[0, 0]))
    nothing = np.zeros(len(times))
    counts = split(np.array(times), nothing, nothing, nothing, math.inf, 1, 0, count)
    assert counts is not None, "no memory is computed"
    ends = itertools.accumulate(counts)
    layers = [sum(blocks[end - own : end]) for own, end in zip(counts, ends, strict=True)]
    return _staged(layout, unit, layers, chunks)


def _staged(layout: Layout, unit: UnitPlan, layers: list[int], chunks: int = 1) -> Layout:
    """Return the layout with these layer counts as the stages of its only unit."""
    pp = len(layers) // chunks
    gpus = unit.tp_cp_size * unit.dp * pp
    update = {"pp": pp, "chunks": chunks, "gpus": gpus, "layers_per_stage": layers}
    staged = {"units": [unit.model_copy(update=update)], "gpus_used": gpus}
    return layout.model_copy(update=staged)
