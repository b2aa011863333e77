"""Exact partition of a unit's layers into contiguous stages that minimises the slowest stage.

Dynamic programme from the last layer: g[r][i] = the slowest stage's time when layers i.. are
partitioned into r stages = min over j of max(time of i..j-1, g[r-1][j]). One run covers every
number of stages, and since r counts stages to the end of the unit, the slots in flight on a stage
(r + stages after the unit) are known inside the recurrence, so memory is a constraint on ranges and
the result stays exact. Vectorised over options.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CHUNK_BYTES = 32 * 2**20


def _ranges(values: Floats) -> Floats:
    """Return [B, L+1, L+1] sums over layers i..j-1 of [B, L]."""
    prefix = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    return prefix[:, None, :] - prefix[:, :, None]


def _slot_ranges(activations: Floats, working: Floats) -> Floats:
    """Return [B, L+1, L+1] `most_of_a_slot` of a stage of layers i..j-1; at least 0 elsewhere."""
    options, layers = activations.shape
    before = np.cumsum(activations, axis=1) - activations
    inside = np.where(
        np.triu(np.ones((layers, layers), dtype=bool)), (before + working)[:, None, :], 0.0
    )
    result = np.zeros((options, layers + 1, layers + 1))
    result[:, :-1, 1:] = np.maximum.accumulate(inside, axis=2) - before[:, :, None]
    return np.maximum(result, 0.0)


def most_of_a_slot(activations: Floats, working: Floats) -> Floats:
    """Return [B] the peak memory of one slot while a stage of all these layers computes it.

    A running layer holds its working memory, and the layers before it their saved tensors [B, L].
    """
    return (np.cumsum(activations, axis=1) - activations + working).max(axis=1)


def slowest_stage(
    times: Floats,
    states: Floats,
    activations: Floats,
    working: Floats,
    limit: Floats,
    slots: int,
    after: int,
    most: int,
    allowed: NDArray[np.bool_] | None = None,
) -> Floats:
    """Return [B, most+1] times of the slowest stage by number of stages; inf if nothing fits.

    Column 0 is unused.

    Args:
        times, states, activations: [B, L] per layer: time, static memory (negative values in the
            first and last layer are savings of their stages), memory per slot in flight.
        working: [B, L] peak memory of a slot while the layer runs, no less than its saved memory.
        limit: [B] memory of a device for them, in the same unit.
        slots: slots per step, which bounds the slots in flight.
        after: stages of the units after this one.
        most: largest number of stages wanted.
        allowed: [L+1, L+1] layer ranges that may form a stage; None = any.
    """
    options, layers = times.shape
    result = np.full((options, most + 1), np.inf)
    chunk = max(1, CHUNK_BYTES // (8 * (layers + 1) ** 2))
    for first in range(0, options, chunk):
        part = slice(first, first + chunk)
        result[part] = _slowest(
            times[part],
            states[part],
            activations[part],
            working[part],
            limit[part],
            slots,
            after,
            most,
            allowed,
        )
    return result


def _slowest(
    times: Floats,
    states: Floats,
    activations: Floats,
    working: Floats,
    limit: Floats,
    slots: int,
    after: int,
    most: int,
    allowed: NDArray[np.bool_] | None,
) -> Floats:
    options, layers = times.shape
    shape = np.triu(np.ones((layers + 1, layers + 1), dtype=bool), k=1)
    if allowed is not None:
        shape &= allowed
    span = np.where(shape, _ranges(times), np.inf)
    room = limit[:, None, None]
    whole = (
        np.maximum(states, 0.0).sum(axis=1)
        + activations.sum(axis=1) * (slots - 1)
        + most_of_a_slot(activations, working)
    )
    fits_always = bool((whole <= limit).all())
    static, dynamic = (
        (span, span)
        if fits_always
        else (_ranges(states) + _slot_ranges(activations, working), _ranges(activations))
    )
    result = np.full((options, most + 1), np.inf)
    best = np.full((options, layers + 1), np.inf)
    best[:, layers] = 0.0
    for stages in range(1, most + 1):
        cost = span
        if not fits_always:
            cost = np.where(
                static + dynamic * (min(slots, stages + after) - 1) <= room, span, np.inf
            )
        best = np.maximum(cost, best[:, None, :]).min(axis=2)
        result[:, stages] = best[:, 0]
    return result


def fewest_stages(
    times: Floats,
    states: Floats,
    activations: Floats,
    working: Floats,
    limit: Floats,
    slots: int | Ints,
    after: int | Ints,
    within: Floats,
    allowed: NDArray[np.bool_] | None = None,
) -> Ints:
    """Return [B] the fewest stages of which none exceeds `within` [B]; layers + 1 if impossible.

    Other arguments as in `slowest_stage`; `slots` and `after` may differ by row. Every stage, from
    the last, takes as many layers as fit: fewer never help the stages before it.
    """
    options, layers = times.shape
    sums = [
        np.concatenate([np.zeros((options, 1)), np.cumsum(values, axis=1)], axis=1)
        for values in (times, states, activations)
    ]
    held = sums[2][:, :-1] + working  # of a running layer, from the first layer on
    slots_, after_ = np.broadcast_to(slots, options), np.broadcast_to(after, options)
    result = np.full(options, layers + 1)
    open_, end = (
        np.arange(options),
        np.full(options, layers),
    )  # rows not yet done; end of their next stage
    for stages in range(1, layers + 1):
        here = np.arange(len(open_))
        time, static, dynamic = (values[here, end][:, None] - values[:, :-1] for values in sums)
        before = np.minimum(slots_, stages + after_)[:, None] - 1
        inside = np.where(np.arange(layers) < end[:, None], held, -np.inf)
        slot = np.maximum.accumulate(inside[:, ::-1], axis=1)[:, ::-1] - sums[2][:, :-1]
        fits = (time <= within[:, None]) & (static + dynamic * before + slot <= limit[:, None])
        fits &= np.arange(layers) < end[:, None]
        if allowed is not None:
            fits &= allowed[:-1, end].T
        begin = fits.argmax(axis=1)
        moved = fits[here, begin]
        result[open_[moved & (begin == 0)]] = stages
        more = moved & (begin > 0)
        if not more.any():
            break
        open_, end, sums = open_[more], begin[more], [values[more] for values in sums]
        slots_, after_, within, limit, held = (
            slots_[more],
            after_[more],
            within[more],
            limit[more],
            held[more],
        )
    return result


def split(
    times: Floats,
    states: Floats,
    activations: Floats,
    working: Floats,
    limit: float,
    slots: int,
    after: int,
    stages: int,
    allowed: NDArray[np.bool_] | None = None,
) -> list[int] | None:
    """Return the layers per stage of a unit's best partition; of equally fast ones the most even.

    Arguments as in `slowest_stage`, for one unit: [L] per layer. None if nothing fits.
    """
    one = times[None], states[None], activations[None], working[None], np.array([limit])
    table = slowest_stage(*one, slots, after, stages, allowed)
    slowest = table[0, stages]
    if not np.isfinite(slowest):
        return None
    layers = len(times)
    span, static, dynamic = (_ranges(values[None])[0] for values in (times, states, activations))
    static = static + _slot_ranges(activations[None], working[None])[0]
    shape = np.triu(np.ones((layers + 1, layers + 1), dtype=bool), k=1)
    if allowed is not None:
        shape &= allowed
    shape &= span <= slowest * (1 + 1e-12)
    best = np.full(layers + 1, np.inf)
    best[layers] = 0.0
    choices = []
    for left in range(1, stages + 1):
        fits = shape & (static + dynamic * (min(slots, left + after) - 1) <= limit)
        cost = np.where(fits, span**2 + best[None, :], np.inf)
        choices.append(cost.argmin(axis=1))
        best = cost.min(axis=1)
    counts, start = [], 0
    for choice in reversed(choices):
        counts.append(int(choice[start]) - start)
        start = int(choice[start])
    return counts
