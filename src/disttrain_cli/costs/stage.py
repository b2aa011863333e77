"""Time of layers and stages: the fitted polynomials of a profile, evaluated.

Everything is linear in work, so with the data's own mix of sizes the time of a layer is base +
slope · sequences. `UnitTimes` keeps both numbers per layer; the planner evaluates millions of
options with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.calls import call
from disttrain_cli.costs.context import exchanged_ms
from disttrain_cli.costs.freezing import Backward, backwards
from disttrain_cli.costs.remembering import remembered
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.plan import UnitShape
from disttrain_cli.spec.profile import (
    HidingPass,
    LayerShard,
    ModuleProfile,
    Polynomial,
    Profile,
    combine,
)
from disttrain_cli.spec.work import Work

Floats = NDArray[np.float64]
NO_WORK = Work()


def slope(polynomial: Polynomial, work: Work) -> float:
    """The part of a polynomial that grows with work, without its base."""
    return polynomial(work) - polynomial.base


def tp_degrees(profile: Profile, modules: Sequence[str]) -> list[int]:
    """TP degrees at which every layer of the modules was profiled, ascending."""
    known = [set(cost.tp) for name in modules for cost in profile.modules[name].costs.values()]
    return sorted(int(tp) for tp in set.intersection(*known)) if known else []


def shard_of(module: ModuleProfile, kind: str, tp: int) -> LayerShard:
    """One rank's part of a kind of layer; raises SpecError where the TP degree was not profiled."""
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
    """Times of a unit's layers [L] at one TP and CP degree: base + slope · sequences, in ms, for
    the data's mean mix."""

    forward_base: Floats
    forward_slope: Floats
    backward_base: Floats
    backward_slope: Floats


@remembered
def unit_times(
    profile: Profile,
    modules: Sequence[str],
    tp: int,
    trained: Sequence[str] | None = None,
    checkpointing: bool = False,
    overlap: bool = False,
    cp: int = 1,
    gathers: bool = False,
) -> UnitTimes:
    """Linear times of every layer of a unit; a module that the data brings no work for takes no
    time.

    Args:
        trained: what is trained (`freezing.backwards`); None = everything.
        checkpointing: the backward runs the forward again first.
        overlap: the TP group's messages travel behind products.
        cp: ranks that share each sequence, with what they exchange inside a node,
        gathers: or gather, of keys and values.
    """
    rows: list[tuple[float, ...]] = []
    shape = UnitShape(tp, 1, 1, checkpointing, cp, gathers)
    for name in modules:
        module = profile.modules[name]
        work = module.work_per_sequence
        layers = list(zip(module.layers, backwards(profile, trained)[name], strict=True))
        row: dict[tuple[str, Backward], tuple[float, ...]] = {}
        for kind, does in dict.fromkeys(layers):
            shard = shard_of(module, kind, tp)
            passes = (
                forward_parts(shard, overlap),
                backward_parts(shard, does, checkpointing, overlap),
            )
            exchanged = exchanged_ms(profile, name, module.costs[kind], shape, does)
            times = [
                time
                for parts, sent in zip(passes, exchanged, strict=True)
                for time in _linear(parts, work, cp, sent)
            ]
            row[kind, does] = (0.0, 0.0, 0.0, 0.0) if work == NO_WORK else tuple(times)
        rows += [row[layer] for layer in layers]
    return UnitTimes(*np.array(rows).T)


def _linear(
    parts: Sequence[Polynomial], work: Work, cp: int, exchanged: Polynomial
) -> tuple[float, float]:
    """Base and slope of a sum of times, for a sequence of so much work on a CP group that exchanges
    meanwhile."""
    return (
        sum(part.base for part in parts) + exchanged.base,
        sum(slope(part, work) for part in parts) / cp + slope(exchanged, work),
    )


@remembered
def overlap_helps(
    profile: Profile,
    modules: Sequence[str],
    tp: int,
    trained: Sequence[str] | None = None,
    checkpointing: bool = False,
    cp: int = 1,
) -> bool:
    """Whether a slot of one mean sequence takes a unit less time where its TP group's messages
    travel behind products."""
    plain, overlapped = (
        unit_times(profile, modules, tp, trained, checkpointing, overlap, cp)
        for overlap in (False, True)
    )
    whole_ms = [sum(map(np.sum, vars(times).values())) for times in (plain, overlapped)]
    return bool(whole_ms[1] < whole_ms[0])


def forward_parts(shard: LayerShard, overlap: bool = False) -> list[Polynomial]:
    """The times in ms that add up to a layer's forward."""
    return [shard.forward_ms, *_hidden(shard, "forward", overlap)]


def backward_parts(
    shard: LayerShard,
    does: Backward,
    checkpointing: bool = False,
    overlap: bool = False,
    later: bool = False,
) -> list[Polynomial]:
    """The times in ms that add up to a layer's backward, its weights' part among them.

    Args:
        overlap: the TP group's messages travel behind products.
        later: the weights' part is computed after the rest.
    """
    if does == "still":
        return []
    if does == "passes":
        again = forward_parts(shard, overlap) if checkpointing else []
        return [shard.backward_input_ms, *_hidden(shard, "backward_input", overlap), *again]
    if checkpointing:
        whole = [shard.backward_ms, shard.forward_ms, shard.recomputing_ms]
        return [*whole, *_hidden(shard, "recomputing", overlap)]
    return [shard.backward_ms, *_hidden(shard, "split" if later else "backward", overlap)]


def _hidden(shard: LayerShard, hiding: HidingPass, overlap: bool) -> list[Polynomial]:
    """What overlapping takes off a pass, as a time below zero."""
    known = shard.hidden_ms.get(hiding) if overlap else None
    return [] if known is None else [combine((-1.0, known))]
