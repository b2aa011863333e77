"""Megatron's virtual pipeline stages (`schedule.interleaved`), for layouts of one unit.

A device holds several chunks of layers instead of one stage. The layers are cut into PP · v chunks,
so that the pipeline fills and drains in v times smaller steps: for equal chunks the bubble is
(PP - 1) / (v · n) of the ideal time, for v times as many messages. Costs are those of chunks as
stages (`costs.layout`), between their actual devices; reductions and gathers overlap with the
passes of their chunk, one chunk's after the other's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from disttrain_cli.costs.activations import at_worst, kept_share, working_share
from disttrain_cli.costs.layout import CostedStage, amount, optimizer_s, reduce_s, stages_of
from disttrain_cli.costs.memory import GIB, layout_memory
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.partition import most_of_a_slot, split
from disttrain_cli.planning.predict import batches
from disttrain_cli.planning.units import Cluster
from disttrain_cli.schedule.interleaved import passes
from disttrain_cli.simulation.interleaved import step_s
from disttrain_cli.simulation.step import pipeline_of
from disttrain_cli.spec.plan import Baseline, Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile.train import Ordering
from disttrain_cli.spec.trace import BACKWARD, FORWARD

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
    (unit,) = layout.units
    cut = layout if chunks == 1 else cut_into(profile, layout, chunks)
    if cut is None or not fits(profile, layout, cut, cluster.memory_gib):
        return math.inf
    stages, devices = stages_of(profile, cut), stages_of(profile, layout)
    placed = [_placed(stage, devices) for stage in stages]
    whole = [
        _merged(stages[device :: unit.pp], device_of) for device, device_of in enumerate(devices)
    ]
    node = cluster.gpus_per_node
    reduced_s = np.array([reduce_s(profile, layout, device, node) for device in whole])
    updated_s = max(optimizer_s(profile, layout, device, node) for device in whole)
    times_s: list[float] = []
    for number in batches(cluster) if numbers is None else numbers:
        pipeline = pipeline_of(profile, cut, placed, draws.loads(layout, number, ordering), node)
        pipeline = dataclasses.replace(pipeline, step_s=updated_s)
        times_s.append(step_s(pipeline, reduced_s))
    return float(np.mean(times_s))


def with_chunks(
    profile: Profile,
    cluster: Cluster,
    draws: Draws,
    layouts: Sequence[Layout],
    found: Baseline,
) -> Baseline:
    """Return a baseline, or one of these layouts with virtual stages, whichever is faster.

    Training does not run virtual stages. They are chosen by the policy of the draws, and timed by
    the better of that and the cluster's, on the batches of `found`.
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
    """Return the layout with PP · chunks stages, the slowest of them minimised.

    Modules replicated over TP (`module_tp`) are not cut. None if there is no such schedule.
    """
    (unit,) = layout.units
    count = unit.pp * chunks
    blocks: list[int] = []  # layers that stay together
    for name in unit.modules:
        layers = len(profile.modules[name].layers)
        blocks += [layers] if name in unit.module_tp else [1] * layers
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
    return _staged(
        layout, unit, [sum(blocks[end - own : end]) for own, end in zip(counts, ends, strict=True)]
    )


def _staged(layout: Layout, unit: UnitPlan, layers: list[int]) -> Layout:
    """Return the layout with these layer counts as the stages of its only unit."""
    gpus = unit.tp_cp_size * unit.dp * len(layers)
    update = {"pp": len(layers), "gpus": gpus, "layers_per_stage": layers}
    staged = {"units": [unit.model_copy(update=update)], "gpus_used": gpus}
    return layout.model_copy(update=staged)


def _placed(stage: CostedStage, devices: Sequence[CostedStage]) -> CostedStage:
    """Return a chunk on its device's ranks; a tied weight's peer keeps the devices' distance."""
    device = devices[stage.number % len(devices)]
    twin = stage.twin
    if twin is not None:
        twin = stage.number + twin % len(devices) - device.number
    return dataclasses.replace(stage, ranks=device.ranks, twin=twin)


def _merged(chunks: Sequence[CostedStage], device: CostedStage) -> CostedStage:
    """Return a device's stage with the layers of all its chunks."""
    return dataclasses.replace(
        device,
        held=[layer for chunk in chunks for layer in chunk.held],
        numbers=[count for chunk in chunks for count in chunk.numbers],
    )


def fits(profile: Profile, layout: Layout, cut: Layout, limit_gib: float) -> bool:
    """Return True if every device has room for its chunks and their slots in flight."""
    (unit,) = layout.units
    chunks = cut.units[0].pp // unit.pp
    stages = layout_memory(profile, cut, limit_gib)
    if chunks == 1:
        return all(stage.peak_gib <= limit_gib for stage in stages)
    kept = at_worst(kept_share, profile, layout, unit)
    running = at_worst(working_share, profile, layout, unit, False, unit.tp_overlap)
    working = np.maximum(kept, running)
    ends = np.cumsum(cut.units[0].layers_per_stage)[:-1]
    kept_of, working_of = np.split(kept, ends), np.split(working, ends)
    keeps = [float(each.sum()) for each in kept_of]
    runs = [
        float(most_of_a_slot(*pair[:, None])[0])
        for pair in map(np.stack, zip(kept_of, working_of, strict=True))
    ]
    waste = profile.device.fragmentation
    for device in range(unit.pp):
        own = stages[device :: unit.pp]
        states = sum(one.weights_gib + one.gradients_gib + one.optimizer_gib for one in own)
        messages = max(one.messages_gib for one in own)
        held = most = 0.0
        for what, chunk, _ in passes(unit.pp, chunks, layout.microbatches, device):
            held += keeps[chunk] * (what == FORWARD)
            most = max(most, held - keeps[chunk] + runs[chunk])
            held -= keeps[chunk] * (what == BACKWARD)
        moving = most / GIB + messages
        if states + moving * (1.0 + waste) + own[0].reserve_gib > limit_gib:
            return False
    return True
