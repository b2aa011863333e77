"""Time of layers and stages: the fitted polynomials of a profile, evaluated.

Everything is linear in work, so with the data's own mix of sizes the time of a layer is base +
slope · sequences. `UnitTimes` holds both numbers per layer; the planner evaluates millions of
options with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.calls import call
from disttrain_cli.costs.experts import exchanged_ms, local_shard
from disttrain_cli.costs.freezing import Backward, backwards
from disttrain_cli.costs.memoised import memoised
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.layer_costs import HidingPass, LayerShard, Polynomial, combine
from disttrain_cli.spec.profile import ModuleProfile, Profile
from disttrain_cli.spec.shape import ParallelShape
from disttrain_cli.spec.work import Work

Floats = NDArray[np.float64]
NO_WORK = Work()


def slope(polynomial: Polynomial, work: Work) -> float:
    """Return the part of a polynomial that grows with work, without its base."""
    return polynomial(work) - polynomial.base


def tp_degrees(profile: Profile, modules: Sequence[str]) -> list[int]:
    """Return the TP degrees at which every layer of the modules was profiled, ascending."""
    known = [set(cost.tp) for name in modules for cost in profile.modules[name].costs.values()]
    return sorted(int(tp) for tp in set.intersection(*known)) if known else []


def shard_of(module: ModuleProfile, kind: str, *, tp: int) -> LayerShard:
    """Return one rank's shard of a kind of layer.

    Raises:
        SpecError: the TP degree was not profiled.
    """
    times = module.costs[kind].tp
    if str(tp) not in times:
        raise SpecError(
            f"The profile has no times of {kind} at TP {tp}",
            f"it has TP {', '.join(times)}",
            f"Use one of these, or profile again: {call('profile')}",
        )
    return times[str(tp)]


@dataclass(frozen=True)
class UnitTimes:
    """Times of a unit's layers [L] in one shape: base + slope · sequences, in ms.

    For the data's mean mix.
    """

    forward_base: Floats
    forward_slope: Floats
    backward_base: Floats
    backward_slope: Floats


@memoised
def unit_times(
    profile: Profile,
    modules: Sequence[str],
    shape: ParallelShape,
    trained: Sequence[str] | None = None,
    overlap: bool = False,
) -> UnitTimes:
    """Return linear times of every layer of a unit; zero for a module without work in the data.

    Args:
        trained: trained modules (`freezing.backwards`); None = all.
        overlap: TP messages overlap with GEMMs.
    """
    rows: list[tuple[float, ...]] = []
    for name in modules:
        module = profile.modules[name]
        work = module.work_per_sequence
        layers = list(zip(module.layers, backwards(profile, trained)[name], strict=True))
        row: dict[tuple[str, Backward], tuple[float, ...]] = {}
        for kind, does in dict.fromkeys(layers):
            unsharded = shard_of(module, kind, tp=shape.tp)
            shard = local_shard(profile, name, kind, shape, unsharded)
            passes = (
                forward_parts(shard, overlap),
                backward_parts(shard, does, shape.recompute, overlap),
            )
            exchanged = exchanged_ms(profile, name, module.costs[kind], shape, does)
            times = [
                time
                for parts, sent in zip(passes, exchanged, strict=True)
                for time in (
                    sum(part.base for part in parts) + sent.base,
                    sum(slope(part, work) for part in parts) / shape.cp + slope(sent, work),
                )
            ]
            row[kind, does] = (0.0, 0.0, 0.0, 0.0) if work == NO_WORK else tuple(times)
        rows += [row[layer] for layer in layers]
    return UnitTimes(*np.array(rows).T)


@memoised
def overlap_helps(
    profile: Profile,
    modules: Sequence[str],
    shape: ParallelShape,
    messages: Literal["tp", "ep"],
    trained: Sequence[str] | None = None,
) -> bool:
    """Return True if overlapping messages of a group shortens a slot of one mean sequence.

    Args:
        messages: those of TP groups with GEMMs, or those of EP groups with experts.
    """
    whole_ms, overlapped_ms = (
        sum(map(np.sum, vars(unit_times(profile, modules, one, trained, tp_overlap)).values()))
        for overlaps in (False, True)
        for one, tp_overlap in [
            (shape, overlaps) if messages == "tp" else (replace(shape, ep_overlap=overlaps), False)
        ]
    )
    return bool(overlapped_ms < whole_ms)


def forward_parts(shard: LayerShard, overlap: bool = False) -> list[Polynomial]:
    """Return the times in ms that add up to a layer's forward."""
    return [shard.forward_ms, *_hidden(shard, "forward", overlap)]


def backward_parts(
    shard: LayerShard,
    does: Backward,
    recompute: bool = False,
    overlap: bool = False,
    later: bool = False,
) -> list[Polynomial]:
    """Return the times in ms that add up to a layer's backward, including weight gradients.

    Args:
        overlap: TP messages overlap with GEMMs.
        later: weight gradients are deferred.
    """
    if does == "still":
        return []
    if does == "passes":
        again = forward_parts(shard, overlap) if recompute else []
        return [shard.backward_input_ms, *_hidden(shard, "backward_input", overlap), *again]
    if recompute:
        whole = [shard.backward_ms, shard.forward_ms, shard.recomputing_ms]
        return [*whole, *_hidden(shard, "recomputing", overlap)]
    return [shard.backward_ms, *_hidden(shard, "split" if later else "backward", overlap)]


def _hidden(shard: LayerShard, hiding: HidingPass, overlap: bool) -> list[Polynomial]:
    """Return the time that overlapping saves in a pass, as a negative time."""
    known = shard.hidden_ms.get(hiding) if overlap else None
    return [] if known is None else [combine((-1.0, known))]
