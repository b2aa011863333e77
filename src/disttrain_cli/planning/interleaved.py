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
from collections.abc import Sequence

import numpy as np

from disttrain_cli.costs.layout import amount, stages_of
from disttrain_cli.costs.memory import fits
from disttrain_cli.planning.climb import shifts
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.finalists import Ranked, chosen_first, one_batch_s, rank_key
from disttrain_cli.planning.partition import split
from disttrain_cli.planning.predict import batches
from disttrain_cli.planning.split_backward import LEAST_GAIN, timed, whole
from disttrain_cli.planning.units import Cluster
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile

CHUNKS = (2, 4, 8)  # chunks per device that are tried
CLOSE = 1.05  # ratio to the time with one stage per rank up to which moving layers may gain
#: Turns of simulated steps, 30 µs each, in which layers are moved: those of many stages stay.
MOST_TURNS = 1 << 13


def with_chunks(
    profile: Profile, cluster: Cluster, draws: Draws, ranked: Sequence[Ranked]
) -> list[Ranked]:
    """Return ranked layouts, and those of one unit with several stages on each rank, best first.

    Only where that gains `LEAST_GAIN` of a step: it sends more messages.

    Args:
        ranked: with their mean times over all batches (`finalists.rank`).
    """
    found = list(ranked)
    for one in ranked:
        if len(one.layout.units) > 1:
            continue
        cuts = [cut_into(profile, whole(one.layout), chunks) for chunks in CHUNKS]
        times_s = [
            (one_batch_s(profile, cut, cluster, draws), cut)
            for cut in cuts
            if cut and fits(profile, cut, cluster.memory_gib)
        ]
        cut_s, cut = min(times_s, key=lambda one: one[0], default=(math.inf, one.layout))
        if cut_s > CLOSE * one.iteration_s:
            continue
        fastest = _shifted(profile, cluster, draws, cut)
        best = Ranked(*timed(profile, cluster, fastest, batches(cluster), draws))
        known = any(other.layout == best.layout for other in found)
        if not known and best.iteration_s < one.iteration_s * (1 - LEAST_GAIN):
            found.append(best)
    return chosen_first(sorted(found, key=rank_key), cluster.gpus_per_node)


def _shifted(profile: Profile, cluster: Cluster, draws: Draws, layout: Layout) -> Layout:
    """Return the layout with layers moved between neighbouring stages while that shortens a step.

    `cut_into` levels stages, not the ranks that several of them share.
    """
    (unit,) = layout.units
    best = one_batch_s(profile, layout, cluster, draws), layout
    left = MOST_TURNS // (2 * (layout.microbatches * unit.chunks + unit.stages))
    while not unit.module_tp:
        moved = [
            _staged(layout, unit, layers, unit.chunks)
            for layers in shifts(best[1].units[0].layers_per_stage)
        ]
        left -= len(moved)
        if left < 0:
            break
        times_s = (
            (one_batch_s(profile, other, cluster, draws), other)
            for other in moved
            if fits(profile, other, cluster.memory_gib)
        )
        fastest = min(times_s, key=lambda one: one[0], default=best)
        if fastest[0] > best[0] * (1 - LEAST_GAIN):
            break
        best = fastest
    return best[1]


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
