"""Activations of a stage by work: bytes saved for a slot, and bytes held while a layer runs.

They are counted at the worst work of a replica, not at the mean. A rank of a CP group has its share
of them, plus what it saves in addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs import experts
from disttrain_cli.costs.context import held_bytes, kept_bytes, rows
from disttrain_cli.costs.freezing import Backward, backwards
from disttrain_cli.costs.memoised import memoised
from disttrain_cli.costs.stage import slope
from disttrain_cli.spec.layer_costs import LayerCost, Polynomial
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.shape import ParallelShape
from disttrain_cli.spec.work import Work

Floats = NDArray[np.float64]
WHOLE = 1e-6  # items; a fractional part below this is rounding of a sum


def worst_mix(
    profile: Profile, modules: Sequence[str], slot_sequences: float, dp: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return one replica's worst work in a slot, by DP.

    Given as multiples of (worst sequence, mean sequence, mean item). A unit with the LLM processes
    entire sequences, M = slot / DP of them, each possibly the worst. Other units share the slot's
    images over their replicas: a slot with one worst sequence among average ones, balanced image by
    image, which leaves at most one image more on a replica than its share (Graham 1969). If all
    images are of one size that is the share rounded up.
    """
    if profile.inputs.llm in modules:
        return slot_sequences / dp, np.zeros_like(dp), np.zeros_like(dp)
    worst, mean = 1.0 / dp, (slot_sequences - 1.0) / dp
    of = profile.modules[modules[0]]
    share = worst * of.max_work_per_sequence.items + mean * of.work_per_sequence.items
    if all(_of_one_size(work) for work in (of.max_work_per_sequence, of.work_per_sequence)):
        return worst, mean, np.ceil(share - WHOLE) - share
    return worst, mean, (dp > 1).astype(float)


def _of_one_size(work: Work) -> bool:
    """Return True if all items have the same tokens (Cauchy-Schwarz inequality is tight)."""
    return math.isclose(work.sum_length_sq * work.items, work.tokens**2, rel_tol=1e-9)


def at_worst(
    share: Callable[..., Floats], profile: Profile, layout: Layout, unit: UnitPlan, *more: bool
) -> Floats:
    """Return [L] one of the shares below for every layer of a unit, at the worst work of a rank."""
    return np.concatenate(
        [
            np.array([1.0, *worst_work(profile, layout, unit, modules[0])])
            @ share(profile, modules, replace(shape, dp=1), layout.trained, *more)
            for modules, shape in unit.parts
        ]
    )


def worst_work(
    profile: Profile, layout: Layout, unit: UnitPlan, module: str
) -> tuple[float, float, float]:
    """Return a replica's worst work in a module per slot, as `worst_mix`.

    If the module's items are distributed over a TP group, the busiest rank has one item beyond its
    share.
    """
    slot = layout.unit_of(profile.inputs.llm).dp * layout.microbatch_size
    mix = worst_mix(profile, unit.modules, slot, np.array([float(unit.dp)]))
    worst, mean, item = (float(part[0]) for part in mix)
    ranks = unit.dealt_over(module)
    return (worst / ranks, mean / ranks, 1.0) if ranks > 1 else (worst, mean, item)


@memoised
def kept_share(
    profile: Profile,
    modules: Sequence[str],
    shape: ParallelShape,
    trained: Sequence[str] | None = None,
) -> Floats:
    """Return [4, L] a rank's `activation_terms` by the work of its replica.

    They are its share of them, plus what it saves in addition.
    """
    terms = activation_terms(profile, modules, trained, tp=shape.tp, recompute=shape.recompute)
    more = _inputs_of_others if shape.recompute else _saved_beyond_share
    return _shared(terms, shape) + more(profile, modules, shape, trained)


@memoised
def working_share(
    profile: Profile,
    modules: Sequence[str],
    shape: ParallelShape,
    trained: Sequence[str] | None = None,
    later: bool = False,
    overlap: bool = False,
) -> Floats:
    """Return [4, L] a rank's `working_terms` by the work of its replica, as `kept_share`."""
    terms = working_terms(
        profile,
        modules,
        trained,
        tp=shape.tp,
        recompute=shape.recompute,
        later=later,
        overlap=overlap,
    )
    alike = replace(shape, recompute=False)
    share = _shared(terms, shape) + _saved_beyond_share(profile, modules, alike, trained)

    def at_experts(name: str, cost: LayerCost, shape: ParallelShape, does: Backward) -> Floats:
        transient = _transient(cost, does, later, tp=shape.tp)
        fixed, row = experts.held_bytes(profile, name, cost, shape, does, transient)
        return np.array([fixed, 0.0, 0.0, 0.0]) + row * own_rows(profile, name, shape)

    if shape.ep > 1:
        share = share + _by_layer(profile, modules, shape, trained, at_experts)
    if shape.cp_comm_type != "all_gather":
        return share
    kept = kept_share(profile, modules, alike, trained)
    held = _by_own_rows(
        profile, modules, shape, trained, lambda _, *known: held_bytes(profile, *known)
    )
    return np.maximum(share, kept + held)


@memoised
def deferred_share(
    profile: Profile,
    modules: Sequence[str],
    shape: ParallelShape,
    trained: Sequence[str] | None = None,
) -> Floats:
    """Return [4, L] a rank's share of `deferred_terms` by the work of its replica."""
    return _shared(deferred_terms(profile, modules, trained, tp=shape.tp), shape)


@memoised
def activation_terms(
    profile: Profile,
    modules: Sequence[str],
    trained: Sequence[str] | None = None,
    *,
    tp: int,
    recompute: bool = False,
) -> Floats:
    """Return [4, L] bytes that one rank saves for a slot per layer.

    The terms are base, worst sequence, mean sequence, mean item. A frozen layer saves what the
    gradient of its inputs needs, or nothing if it has no backward; under activation checkpointing a
    layer saves its input, and the stage's inputs of the slot are kept, including those that only a
    frozen layer reads.
    """
    return _terms(
        profile,
        modules,
        trained,
        lambda cost, does: [
            _kept(cost, does, recompute, tp=tp),
            *([cost.tp[str(tp)].batch_bytes] if recompute else []),
        ],
    )


@memoised
def working_terms(
    profile: Profile,
    modules: Sequence[str],
    trained: Sequence[str] | None = None,
    *,
    tp: int,
    recompute: bool = False,
    later: bool = False,
    overlap: bool = False,
) -> Floats:
    """Return [4, L] the peak bytes of a slot while a layer runs, including what it then saves.

    Terms as in `activation_terms`.

    Args:
        later: weight gradients are deferred until after the backward.
        overlap: TP messages overlap with GEMMs. The symmetric memory for them is allocated
            whichever layer runs.
    """

    def amounts(cost: LayerCost, does: Backward) -> list[Polynomial]:
        shard = cost.tp[str(tp)]
        again = [shard.recomputing_bytes] if recompute and does != "still" else []
        buffers = [shard.overlapping_bytes] if overlap else []
        transient = _transient(cost, does, later, tp=tp)
        return [_kept(cost, does, False, tp=tp), transient, *again, *buffers]

    terms = _terms(profile, modules, trained, amounts)
    if not overlap:
        return terms
    stays = _terms(profile, modules, trained, lambda cost, does: [cost.tp[str(tp)].symmetric_bytes])
    return terms + stays.max(axis=1, keepdims=True)


def deferred_terms(
    profile: Profile, modules: Sequence[str], trained: Sequence[str] | None = None, *, tp: int
) -> Floats:
    """Return [4, L] bytes that a layer keeps from its backward to its deferred weight gradients.

    Terms as in `activation_terms`.
    """
    return _terms(
        profile,
        modules,
        trained,
        lambda cost, does: [cost.tp[str(tp)].deferred_bytes] if does == "trained" else [],
    )


def _terms(
    profile: Profile,
    modules: Sequence[str],
    trained: Sequence[str] | None,
    amounts: Callable[[LayerCost, Backward], list[Polynomial]],
) -> Floats:
    rows: list[list[float]] = []
    for name in modules:
        module = profile.modules[name]
        mean, worst = module.work_per_sequence, module.max_work_per_sequence
        item = mean.scaled(1.0 / mean.items) if mean.items else Work()
        layers = list(zip(module.layers, backwards(profile, trained)[name], strict=True))
        row: dict[tuple[str, Backward], list[float]] = {}
        for kind, does in dict.fromkeys(layers):
            parts = amounts(module.costs[kind], does)
            row[kind, does] = [
                sum(part.base for part in parts),
                *(sum(slope(part, work) for part in parts) for work in (worst, mean, item)),
            ]
        rows += [row[layer] for layer in layers]
    return np.array(rows).T


def _transient(cost: LayerCost, does: Backward, later: bool, *, tp: int) -> Polynomial:
    """Return the peak bytes of a slot in a layer on one rank beyond those that it then saves."""
    shard = cost.tp[str(tp)]
    if does == "still" and shard.still_bytes is not None:
        return shard.still_bytes
    return shard.split_transient_bytes if later and does == "trained" else shard.transient_bytes


def _kept(cost: LayerCost, does: Backward, recompute: bool, *, tp: int) -> Polynomial:
    """Return the bytes of one slot that a layer saves on one rank from forward to backward."""
    if does == "still":
        return Polynomial()
    shard = cost.tp[str(tp)]
    if recompute:
        return shard.input_bytes
    return shard.activation_bytes if does == "trained" else shard.frozen_activation_bytes


def _shared(terms: Floats, shape: ParallelShape) -> Floats:
    """Return the terms of a CP rank from those of its replica."""
    return np.vstack([terms[:1], terms[1:] / shape.cp])


@memoised
def _saved_beyond_share(
    profile: Profile, modules: Sequence[str], shape: ParallelShape, trained: Sequence[str] | None
) -> Floats:
    """Return [4, L] bytes that a rank saves for a slot beyond its share of the work (CP, EP)."""

    def row_bytes(name: str, cost: LayerCost, shape: ParallelShape, does: Backward) -> float:
        in_context = kept_bytes(profile, name, cost, shape, does)
        return in_context + experts.kept_bytes(profile, name, cost, shape, does)

    return _by_own_rows(profile, modules, shape, trained, row_bytes)


def _by_own_rows(
    profile: Profile,
    modules: Sequence[str],
    shape: ParallelShape,
    trained: Sequence[str] | None,
    row_bytes: Callable[[str, LayerCost, ParallelShape, Backward], float],
) -> Floats:
    """Return [4, L] bytes proportional to a rank's local rows."""
    return _by_layer(
        profile,
        modules,
        shape,
        trained,
        lambda name, *known: row_bytes(name, *known) * own_rows(profile, name, shape),
    )


def _by_layer(
    profile: Profile,
    modules: Sequence[str],
    shape: ParallelShape,
    trained: Sequence[str] | None,
    terms: Callable[[str, LayerCost, ParallelShape, Backward], Floats],
) -> Floats:
    """Return [4, L] the terms of every layer."""
    columns: list[Floats] = []
    for name in modules:
        module = profile.modules[name]
        layers = list(zip(module.layers, backwards(profile, trained)[name], strict=True))
        each = {
            (kind, does): terms(name, module.costs[kind], shape, does)
            for kind, does in dict.fromkeys(layers)
        }
        columns += [each[layer] for layer in layers]
    return np.array(columns).T


def _inputs_of_others(
    profile: Profile, modules: Sequence[str], shape: ParallelShape, trained: Sequence[str] | None
) -> Floats:
    """Return [4, L] bytes of a slot's inputs that a CP rank holds for the other ranks.

    Encoders receive entire images. They are kept if activations are recomputed.
    """
    given = _terms(
        profile, modules, trained, lambda cost, does: [cost.tp[str(shape.tp)].batch_bytes]
    )
    encodes = [
        profile.modules[name].kind == "encoder"
        for name in modules
        for _ in profile.modules[name].layers
    ]
    return given * encodes * (1.0 - 1.0 / shape.cp)


@memoised
def own_rows(profile: Profile, name: str, shape: ParallelShape) -> Floats:
    """Return [4] rows of a module on a CP rank, by the terms of `activation_terms`."""
    module = profile.modules[name]
    mean = module.work_per_sequence
    item = mean.scaled(1.0 / mean.items) if mean.items else Work()
    works = (module.max_work_per_sequence, mean, item)
    return np.array([0.0, *(rows(profile, name, work) / shape.cp for work in works)])
