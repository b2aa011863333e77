"""Peak memory of a stage: weights, gradients, optimizer states, and activations of the slots in flight.

Bytes per parameter follow DeepSpeed's engines (bf16 with ZeRO-1 keeps an unsharded fp32 gradient buffer).
Activations are counted at the worst work a replica can meet, not at the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.stage import slope
from disttrain_cli.spec.plan import Layout, StageMemory
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.work import Work

Floats = NDArray[np.float64]
GIB = float(2**30)


def bytes_per_parameter(precision: str, zero_stage: int) -> tuple[float, float]:
    """Bytes of one parameter that every replica keeps, and those its replicas share (divided by DP).

    bf16, ZeRO-1: 2 weight + 2 transient gradient + 4 fp32 gradient, and 12 shared (fp32 weight, two moments).
    fp32: 4 weight + 4 gradient, and 8 of Adam's moments, shared with ZeRO-1.
    """
    if precision == "bf16":
        return 8.0, 12.0
    return (8.0, 8.0) if zero_stage == 1 else (16.0, 0.0)


def worst_mix(holds_llm: bool, slot_sequences: float, dp: Floats) -> tuple[Floats, Floats, Floats]:
    """Worst work of one replica in a slot, as multiples of (worst sequence, mean sequence, mean item), by DP.

    A unit with the LLM works on whole sequences, M = slot / DP of them, each possibly the worst. Other units
    share the slot's images over their replicas: a slot with one worst sequence among average ones, levelled
    image by image, which leaves at most one image more on a replica than its share.
    """
    if holds_llm:
        return slot_sequences / dp, np.zeros_like(dp), np.zeros_like(dp)
    return 1.0 / dp, (slot_sequences - 1.0) / dp, (dp > 1).astype(float)


def activation_terms(profile: Profile, modules: Sequence[str]) -> Floats:
    """Bytes of one slot's activations per layer as [4, L]: base, worst sequence, mean sequence, mean item."""
    rows: list[tuple[float, float, float, float]] = []
    for name in modules:
        module = profile.modules[name]
        mean, worst = module.work_per_sequence, module.max_work_per_sequence
        item = mean.scaled(1.0 / mean.items) if mean.items else Work()
        for kind in module.layers:
            amount = module.costs[kind].activation_bytes
            rows.append((amount.base, slope(amount, worst), slope(amount, mean), slope(amount, item)))
    return np.array(rows).T


def parameters(profile: Profile, modules: Sequence[str]) -> Floats:
    """Parameters of every layer of a unit [L]."""
    return np.array([float(profile.modules[name].costs[kind].parameters)
                     for name in modules for kind in profile.modules[name].layers])


def stages_to_end(layout: Layout) -> list[list[int]]:
    """For every stage of every unit, the stages from it to the end of the whole pipeline (itself included)."""
    left = sum(unit.pp for unit in layout.units)
    counts: list[list[int]] = []
    for unit in layout.units:
        counts.append([left - stage for stage in range(unit.pp)])
        left -= unit.pp
    return counts


def layout_memory(profile: Profile, layout: Layout, zero_stage: int, limit_gib: float) -> list[StageMemory]:
    """Peak memory of every stage of a layout.

    Slots in flight on a stage of a 1F1B pipeline: the stages from it to the end over all units, at most n.
    """
    kept, shared = bytes_per_parameter(profile.precision, zero_stage)
    slot = layout.unit_of(profile.inputs.llm).dp * layout.microbatch_size
    result: list[StageMemory] = []
    for unit, to_end in zip(layout.units, stages_to_end(layout), strict=True):
        mix = np.array(worst_mix(profile.inputs.llm in unit.modules, slot, np.array([float(unit.dp)])))[:, 0]
        states = parameters(profile, unit.modules) * (kept + shared / unit.dp) / unit.tp
        activations = np.array([1.0, *mix]) @ activation_terms(profile, unit.modules) / unit.tp
        start = 0
        for stage, layers in enumerate(unit.layers_per_stage):
            flight = min(layout.microbatches, to_end[stage])
            stop = start + layers
            peak = states[start:stop].sum() + flight * activations[start:stop].sum()
            result.append(StageMemory(unit=unit.name, stage=stage, peak_gib=float(peak) / GIB, limit_gib=limit_gib))
            start = stop
    return result
