"""Peak memory of a stage: weights, gradients, optimizer states, and activations of the slots in flight.

Bytes per parameter follow DeepSpeed's engines (bf16 with ZeRO-1 keeps an unsharded fp32 gradient buffer).
Activations are counted at the worst work a replica can meet, not at the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.freezing import Backward, backwards
from disttrain_cli.costs.stage import slope
from disttrain_cli.spec.plan import Layout, StageMemory, to_end
from disttrain_cli.spec.profile import LayerCost, Polynomial, Profile
from disttrain_cli.spec.work import Work

Floats = NDArray[np.float64]
GIB = float(2**30)
WEIGHT_BYTES = {"bf16": 2.0, "fp32": 4.0}


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


def activation_terms(profile: Profile, modules: Sequence[str], tp: int, trained: Sequence[str] | None = None,
                     checkpointing: bool = False) -> Floats:
    """Bytes that one rank keeps of a slot per layer as [4, L]: base, worst sequence, mean sequence, mean item.

    A frozen layer keeps what the gradient of its inputs needs, or nothing where it has no backward; under
    activation checkpointing a layer keeps its input.
    """
    rows: list[tuple[float, float, float, float]] = []
    for name in modules:
        module = profile.modules[name]
        mean, worst = module.work_per_sequence, module.max_work_per_sequence
        item = mean.scaled(1.0 / mean.items) if mean.items else Work()
        for kind, does in zip(module.layers, backwards(profile, trained)[name], strict=True):
            amount = _kept(module.costs[kind], tp, does, checkpointing)
            rows.append((amount.base, slope(amount, worst), slope(amount, mean), slope(amount, item)))
    return np.array(rows).T


def _kept(cost: LayerCost, tp: int, does: Backward, checkpointing: bool) -> Polynomial:
    """Bytes of one slot that a layer keeps on one rank from forward to backward."""
    if does == "still":
        return Polynomial()
    shard = cost.tp[str(tp)]
    if checkpointing:
        return shard.input_bytes
    return shard.activation_bytes if does == "trained" else shard.frozen_activation_bytes


def recomputed_terms(profile: Profile, modules: Sequence[str], tp: int, trained: Sequence[str] | None = None) -> Floats:
    """Bytes [4] of the largest layer, which exist beside what is kept while checkpointing recomputes it."""
    return activation_terms(profile, modules, tp, trained).max(axis=1)


def state_bytes(profile: Profile, modules: Sequence[str], tp: int, zero_stage: int,
                trained: Sequence[str] | None = None) -> tuple[Floats, Floats]:
    """Bytes of weights, gradients and optimizer states of every layer [L] on one rank of a TP group.

    The first array is what every replica keeps, the second what the replicas of a unit share (divided by DP).
    A frozen layer has weights only.
    """
    kept, shared = bytes_per_parameter(profile.precision, zero_stage)
    weight = WEIGHT_BYTES[profile.precision]
    trains = np.array([does == "trained" for name in modules for does in backwards(profile, trained)[name]])
    count = parameters(profile, modules, tp)
    return count * np.where(trains, kept, weight), count * np.where(trains, shared, 0.0)


def parameters(profile: Profile, modules: Sequence[str], tp: int) -> Floats:
    """Parameters of every layer of a unit [L] on one rank of a TP group."""
    return np.array([float(profile.modules[name].costs[kind].tp[str(tp)].parameters)
                     for name in modules for kind in profile.modules[name].layers])


def stages_to_end(layout: Layout, llm: str) -> list[list[int]]:
    """For every stage of every unit, the stages from it to the end of its own line (itself included)."""
    left = to_end([unit.pp for unit in layout.units], layout.place_of(llm))
    return [[count - stage for stage in range(unit.pp)] for unit, count in zip(layout.units, left, strict=True)]


def layout_memory(profile: Profile, layout: Layout, limit_gib: float) -> list[StageMemory]:
    """Peak memory of every stage of a layout.

    Slots in flight on a stage of a 1F1B pipeline: the stages from it to the end of its line of units, at most n.
    """
    slot = layout.unit_of(profile.inputs.llm).dp * layout.microbatch_size
    result: list[StageMemory] = []
    for unit, left in zip(layout.units, stages_to_end(layout, profile.inputs.llm), strict=True):
        mix = np.array(worst_mix(profile.inputs.llm in unit.modules, slot, np.array([float(unit.dp)])))[:, 0]
        weights = np.array([1.0, *mix])
        kept, shared = state_bytes(profile, unit.modules, unit.tp, layout.zero_stage, layout.trained)
        activations = weights @ activation_terms(profile, unit.modules, unit.tp, layout.trained, unit.checkpointing)
        again = 0.0
        if unit.checkpointing:
            again = float(weights @ recomputed_terms(profile, unit.modules, unit.tp, layout.trained))
        weight = parameters(profile, unit.modules, unit.tp) * WEIGHT_BYTES[profile.precision]
        unsharded = state_bytes(profile, unit.modules, unit.tp, 1, layout.trained)[0]
        states = (weight, unsharded - weight, kept + shared / unit.dp - unsharded)
        start = 0
        for stage, layers in enumerate(unit.layers_per_stage):
            flight = min(layout.microbatches, left[stage])
            span = slice(start, start + layers)
            parts = [*(float(values[span].sum()) for values in states), flight * activations[span].sum() + again]
            weights_gib, gradients_gib, optimizer_gib, activations_gib = (part / GIB for part in parts)
            result.append(StageMemory(
                unit=unit.name, stage=stage, peak_gib=sum(parts) / GIB, limit_gib=limit_gib, weights_gib=weights_gib,
                gradients_gib=gradients_gib, optimizer_gib=optimizer_gib, activations_gib=activations_gib))
            start += layers
    return result
