"""What a layout will do: the simulator run on the data's mean work, memory, and MFU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.flops import flops_per_sequence, mfu
from disttrain_cli.costs.memory import layout_memory, parameters
from disttrain_cli.costs.stage import unit_times
from disttrain_cli.planning.objective import layout_time, unit_stages_ms
from disttrain_cli.planning.units import Cluster, Unit
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.sharing import simulate_shared
from disttrain_cli.simulation.timeline import Pipeline, Timeline
from disttrain_cli.spec.plan import Layout, Prediction, UnitPlan, UnitTime
from disttrain_cli.spec.profile import Profile

Floats = NDArray[np.float64]
GRADIENT_BYTES = 4  # reduced in fp32 in both precisions


def mean_loads(unit: Unit, dp: int, slot_sequences: int, slots: int) -> Floats:
    """[n, DP] sequences' worth of work of every replica in every slot, for data that is all alike.

    Images are whole: slot k has floor((k+1)·T) - floor(k·T) of them at T per slot, spread evenly.
    """
    items = unit.items_per_sequence
    if unit.holds_llm or items == 0:
        return np.full((slots, dp), slot_sequences / dp)
    totals = np.diff(np.floor(np.arange(slots + 1) * slot_sequences * items + 1e-9)).astype(np.int64)
    share, rest = np.divmod(totals, dp)
    images = share[:, None] + (np.arange(dp)[None, :] < rest[:, None])
    return images / items


def pipeline_of(units: list[Unit], layout: Layout) -> Pipeline:
    """The step of a layout as the simulator takes it."""
    profile = units[0].profile
    slots, size = layout.microbatches, layout.global_batch_size // layout.microbatches
    stages = sum(plan.pp for plan in layout.units)
    width = max(plan.dp for plan in layout.units)
    forward, backward = np.zeros((slots, stages, width)), np.zeros((slots, stages, width))
    replicas, entry, reduce_s, transfer_s = [], [], [], []
    stage = 0
    for number, (unit, plan) in enumerate(zip(units, layout.units, strict=True)):
        times = unit_times(profile, unit.modules, plan.tp)
        loads = mean_loads(unit, plan.dp, size, slots)
        weights = parameters(profile, unit.modules)
        start = 0
        for index, layers in enumerate(plan.layers_per_stage):
            span = slice(start, start + layers)
            for target, base, slope in ((forward, times.forward_base, times.forward_slope),
                                        (backward, times.backward_base, times.backward_slope)):
                ms = np.maximum(0.0, base[span].sum() + slope[span].sum() * loads)
                target[:, stage, :plan.dp] = np.where(loads > 0, ms, 0.0) / 1e3
            replicas.append(plan.dp)
            entry.append(index == 0)
            reduce_s.append(_reduce_s(profile, plan, float(weights[span].sum())))
            following = layout.units[number + 1] if number + 1 < len(units) else None
            after = plan if index + 1 < plan.pp else following
            if after is not None:
                transfer_s.append(_transfer_s(unit, start + layers, size, min(plan.dp, after.dp)))
            start += layers
            stage += 1
    return Pipeline(np.array(replicas), np.array(entry), forward, backward, np.array(transfer_s), np.array(reduce_s))


def _reduce_s(profile: Profile, plan: UnitPlan, weights: float) -> float:
    """Time of the gradient reduction over the replicas of a stage."""
    if plan.dp == 1:
        return 0.0
    bits = weights / plan.tp * GRADIENT_BYTES * 8
    return profile.links.all_reduce_us / 1e6 + bits / (profile.links.all_reduce_gbps * 1e9)


def _transfer_s(unit: Unit, layer: int, slot_sequences: int, dp: int) -> float:
    """Time of one crossing before a layer of the unit (or after its last) for the busier side's replica.

    The profile knows what modules send; a cut inside a module counts with its latency only.
    """
    end, link = 0, unit.profile.links
    for name in unit.modules:
        end += len(unit.profile.modules[name].layers)
        if end == layer:
            size = unit.profile.modules[name].output_bytes_per_sequence * slot_sequences / dp
            return link.p2p_us / 1e6 + size * 8 / (link.p2p_gbps * 1e9)
    return link.p2p_us / 1e6


def timeline_of(profile: Profile, pipeline: Pipeline) -> Timeline:
    """The predicted timeline: with processor sharing where the ranks share a CPU."""
    device = profile.device
    if device.kind == "cpu":
        return simulate_shared(pipeline, device.cores, device.shared_by)
    return simulate(pipeline)


def _sharing(pipeline: Pipeline, timeline: Timeline, first: int, plan: UnitPlan) -> float:
    """Simulated compute time of a unit over the same without the sharing of cores."""
    own = (slice(None), slice(first, first + plan.pp), slice(plan.dp))
    alone = float((pipeline.forward_s + pipeline.backward_s)[own].sum())
    return float(timeline.busy_s[own[1:]].sum()) / alone if alone else 1.0


def predict(units: list[Unit], layout: Layout, cluster: Cluster) -> Prediction:
    """Time, MFU and memory of a layout.

    `iteration_s` and the bubble come from the simulator, `warmup_s` and `steady_s` from the formula, which takes
    every rank to have a device of its own.

    Raises:
        SpecError: the predicted MFU exceeds 100 %, so the profile's peak is wrong.
    """
    profile = units[0].profile
    pipeline = pipeline_of(units, layout)
    timeline = timeline_of(profile, pipeline)
    formula = layout_time(units, layout)
    size = layout.global_batch_size // layout.microbatches
    flops = sum(flops_per_sequence(profile).values()) * layout.global_batch_size
    rows, stage = [], 0
    for unit, plan in zip(units, layout.units, strict=True):
        times = unit_times(profile, unit.modules, plan.tp)
        load = mean_loads(unit, plan.dp, size, layout.microbatches).mean()
        stages_ms = unit_stages_ms(unit, plan.tp, plan.dp, plan.layers_per_stage, size)
        rows.append(UnitTime(unit=unit.name,
                             forward_ms=float(times.forward_base.sum() + times.forward_slope.sum() * load),
                             backward_ms=float(times.backward_base.sum() + times.backward_slope.sum() * load),
                             stage_ms=max(stages_ms), sharing=_sharing(pipeline, timeline, stage, plan)))
        stage += plan.pp
    return Prediction(
        iteration_s=timeline.iteration_s, sequences_per_s=layout.global_batch_size / timeline.iteration_s,
        mfu=mfu(flops, timeline.iteration_s, profile.device, layout.gpus_used),
        warmup_s=formula.warmup_ms / 1e3, steady_s=formula.steady_ms / 1e3,
        bubble_fraction=timeline.bubble_fraction,
        memory=layout_memory(profile, layout, cluster.zero_stage, cluster.memory_gib), units=rows)
