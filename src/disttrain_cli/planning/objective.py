"""The objective: the time of a step as in DistTrain's paper (section on model orchestration).

    T        = T_warmup + T_steady
    T_warmup = time of the first slot through the entire pipeline, forward and backward: the
               slowest of the parallel encoders, the LLM and the generators in sequence (the
               simulator, which ranks the search's results, runs these in parallel)
    T_steady = time of one slot on the slowest stage × (n - 1)

The paper uses C(TP) per sample, so a unit's time per slot is C · S/DP. Here a layer's time is base
+ slope · sequences, because a kernel launch or a small GEMM does not shrink with its work; with
base 0 and evenly divisible layers the formula is the paper's. Transfers between units count on the
stages at both ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.planning.units import Unit, holder_of
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.shape import ParallelShape
from disttrain_cli.spec.stage_graph import in_line

Floats = NDArray[np.float64]


def busiest_load(
    holds_llm: bool, slot_sequences: int, items_per_sequence: float, dp: Floats
) -> Floats:
    """Return the work of a unit's busiest replica in a slot, in sequences, for every DP.

    LLM replicas have exactly S/DP sequences. Encoders and generators share T = S · items images
    over their replicas, and an image cannot be cut: of T images one replica has ceil(T/DP). T
    varies from slot to slot; if its remainder by DP is uniform the mean of that ceiling is T/DP +
    (DP-1)/(2·DP). A replica that has any has one, and none has more than all: hence min(T, max(1,
    that)).
    """
    if holds_llm:
        return slot_sequences / dp
    if items_per_sequence == 0:
        return np.zeros_like(dp)
    total = slot_sequences * items_per_sequence
    images = np.minimum(total, np.maximum(1.0, total / dp + (dp - 1) / (2 * dp)))
    return images / items_per_sequence


class Time(NamedTuple):
    """The formula's two terms, in ms."""

    warmup_ms: float
    steady_ms: float

    @property
    def total_ms(self) -> float:
        return self.warmup_ms + self.steady_ms


def combine(unit_ms: list[float], stage_ms: list[float], slots: int, llm: int) -> Time:
    """Combine every unit's total time and slowest stage per slot; `llm` is the LLM's unit index."""
    return Time(max(in_line(unit_ms, llm)), max(stage_ms) * (slots - 1))


def unit_stages_ms(
    unit: Unit,
    shape: ParallelShape,
    layers_per_stage: list[int],
    slot_sequences: int,
    overlap: bool | None = None,
) -> list[float]:
    """Return the time of every stage of a unit for one slot: forward + backward + transfers.

    `overlap` as in `Unit.layer_ms`.
    """
    base, slope = unit.layer_ms(shape, overlap)
    load = busiest_load(
        unit.holds_llm, slot_sequences, unit.items_per_sequence, np.array([float(shape.dp)])
    )[0]
    layers = np.maximum(0.0, base + slope * load)
    ends = np.cumsum(layers_per_stage)
    return [
        float(layers[stop - count : stop].sum())
        for count, stop in zip(layers_per_stage, ends, strict=True)
    ]


def planned_stages_ms(unit: Unit, plan: UnitPlan, slot_sequences: int) -> list[float]:
    """Return `unit_stages_ms` of a unit in a layout; with `chunks`, of all stages of each rank."""
    times_ms = unit_stages_ms(
        unit, plan.shape, plan.layers_per_stage, slot_sequences, plan.tp_overlap
    )
    return [sum(times_ms[device :: plan.pp]) for device in range(plan.pp)]


def layout_time(units: list[Unit], layout: Layout) -> Time:
    """Return the formula's time for an entire layout."""
    slot = layout.global_batch_size // layout.microbatches
    stages = [
        planned_stages_ms(unit, plan, slot) for unit, plan in zip(units, layout.units, strict=True)
    ]
    return combine(
        [sum(times) for times in stages],
        [max(times) for times in stages],
        layout.microbatches,
        holder_of(units),
    )
