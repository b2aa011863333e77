"""Weights of the slots: a simulator-driven search for each unit's work in every slot of a step.

Encoders and generators on separate ranks need not get equal work in every slot: the LLM starts
sooner after a first slot of few images, and ends sooner before a last one. The slots between are
equal, and may be slightly heavier than the mean if the unit has idle time and memory for their
activations.

The search models one rank per stage, whose time for a slot is the unit's mean time times the slot's
weight, and of many slots only the first and last. Weights of these change in steps of decreasing
size; a change is accepted if it shortens the simulated step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.slots import Ints
from disttrain_cli.simulation.makespan import iterations_s
from disttrain_cli.simulation.timeline import Floats, Pipeline

MOVES = (0.4, 0.2, 0.1, 0.05)  # of a slot's mean work, one after the other
ROUNDS = 24  # of each size, at most; each evaluates every move once
# slots times rounds of a size: the ends of pipelines with many slots matter less
SLOT_ROUNDS = 2400
# slots that are simulated at most; in longer steps those between the first and last are equal
SLOTS_PER_STAGE, LEAST_SLOTS = 4, 64
ENDS = 8  # first and last slots whose weights change one by one, plus one for every two stages
NEAR = 2  # largest distance of slots between which work moves directly, not by way of all
LEAST_GAIN = 1e-5  # of a step's time
NUMBERS = 1 << 23  # durations of steps in memory at once, about


@dataclass(frozen=True)
class Shaped:
    """A unit whose slots may differ in work."""

    stages: slice
    base_s: Floats  # [parts, stages] independent of the work, on the mean replica
    work_s: Floats  # [parts, stages] proportional to the work, of the mean slot
    # [n] least sum of weights of any 1, 2, ... n slots: that of the lightest sequences
    lightest: Floats
    window: int  # consecutive slots whose activations are kept at once
    most: float  # mean weight of a window, at most


def shape(pipeline: Pipeline, units: Sequence[Shaped]) -> Floats:
    """Return the weights [n, units] of the slots, of mean 1.

    Args:
        pipeline: one rank per stage; its durations are those of equal slots.
    """
    every = len(pipeline.forward_s)
    slots = min(every, max(LEAST_SLOTS, SLOTS_PER_STAGE * len(pipeline.replicas)))
    pipeline = dataclasses.replace(
        pipeline,
        forward_s=pipeline.forward_s[:slots],
        backward_s=pipeline.backward_s[:slots],
        weight_s=None if pipeline.weight_s is None else pipeline.weight_s[:slots],
    )
    weights = np.ones((slots, len(units)))
    best_s = float(_times_s(pipeline, units, weights[None])[0])
    ends = min(slots, 2 * (ENDS + len(pipeline.replicas) // 2))
    free = np.concatenate([np.arange((ends + 1) // 2), np.arange(slots - ends // 2, slots)])
    for size in MOVES:
        for _ in range(max(1, min(ROUNDS, SLOT_ROUNDS // slots))):
            candidates = np.concatenate(
                [_moved(weights, number, free, size, unit) for number, unit in enumerate(units)]
                or [weights[None]]
            )
            if not len(candidates):
                break
            times_s = _times_s(pipeline, units, candidates)
            chosen = int(times_s.argmin())
            if times_s[chosen] > best_s * (1 - LEAST_GAIN):
                break
            weights, best_s = candidates[chosen], float(times_s[chosen])
    return np.insert(weights, [(slots + 1) // 2] * (every - slots), 1.0, axis=0)


def _moved(weights: Floats, number: int, free: Ints, size: float, unit: Shaped) -> Floats:
    """Return the weights [K, n, units] after moves of a unit's work.

    A move is between two of the free slots, or a free one and all.
    """
    slots = len(weights)
    source, target = (positions.reshape(-1) for positions in np.meshgrid(free, free, indexing="ij"))
    apart = (source != target) & (abs(source - target) <= NEAR)
    steps = np.zeros((int(apart.sum()), slots))
    rows = np.arange(len(steps))
    steps[rows, target[apart]], steps[rows, source[apart]] = size, -size
    one = np.zeros((len(free), slots))
    one[np.arange(len(free)), free] = size
    one -= size / slots
    weight = weights[:, number] + np.concatenate([steps, one, -one])
    weight = weight[_possible(weight, unit)]
    candidates = np.repeat(weights[None], len(weight), axis=0)
    candidates[:, :, number] = weight
    return candidates


def _possible(weights: Floats, unit: Shaped) -> NDArray[np.bool_]:
    """Return a mask [K] of the weights [K, n] for which sequences and memory suffice."""
    lightest = unit.lightest[: weights.shape[1]]
    light = (np.cumsum(np.sort(weights, axis=1), axis=1) >= lightest - 1e-9).all(axis=1)
    total = np.cumsum(np.pad(weights, ((0, 0), (1, 0))), axis=1)
    window = min(unit.window, weights.shape[1])
    fullest = (total[:, window:] - total[:, :-window]).max(axis=1)
    return light & (fullest <= window * max(1.0, unit.most) + 1e-9) & (weights >= 0.0).all(axis=1)


def _times_s(pipeline: Pipeline, units: Sequence[Shaped], weights: Floats) -> Floats:
    """Return the simulated times [K] of the steps with these weights [K, n, units]."""
    size = max(1, NUMBERS // pipeline.forward_s.size)
    parts = [weights[begin : begin + size] for begin in range(0, len(weights), size)]
    return np.concatenate([_some_s(pipeline, units, part) for part in parts])


def _some_s(pipeline: Pipeline, units: Sequence[Shaped], weights: Floats) -> Floats:
    """Return the times of as many steps as fit into memory at once."""
    durations = [np.empty((*times_s.shape, len(weights))) for times_s in pipeline.parts_s]
    for part, times_s in zip(durations, pipeline.parts_s, strict=True):
        part[:] = times_s[..., None]
    for number, unit in enumerate(units):
        weight = weights[:, :, number].T[:, None, :]  # [n, 1, K]
        for times_s, base_s, work_s in zip(durations, unit.base_s, unit.work_s, strict=True):
            times_s[:, unit.stages, 0] = np.where(weight > 0, base_s[:, None], 0.0) + (
                work_s[:, None] * weight
            )
    return iterations_s(pipeline, *durations)
