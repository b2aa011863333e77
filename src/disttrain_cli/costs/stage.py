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

from disttrain_cli.costs.freezing import Backward, backwards
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.profile import LayerShard, ModuleProfile, Polynomial, Profile
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
            "Use one of these, or profile again: disttrain profile",
        )
    return times[str(tp)]


@dataclass(frozen=True)
class UnitTimes:
    """Times of a unit's layers [L] at one TP degree: base + slope · sequences, in ms, for the
    data's mean mix."""

    forward_base: Floats
    forward_slope: Floats
    backward_base: Floats
    backward_slope: Floats


def unit_times(
    profile: Profile,
    modules: Sequence[str],
    tp: int,
    trained: Sequence[str] | None = None,
    checkpointing: bool = False,
) -> UnitTimes:
    """Linear times of every layer of a unit; a module that the data brings no work for takes no
    time.

    Args:
        trained: what is trained (`freezing.backwards`); None = everything.
        checkpointing: the backward runs the forward again first.
    """
    rows: list[tuple[float, float, float, float]] = []
    for name in modules:
        module = profile.modules[name]
        work = module.work_per_sequence
        for kind, does in zip(module.layers, backwards(profile, trained)[name], strict=True):
            shard = shard_of(module, kind, tp)
            forward = (shard.forward_ms.base, slope(shard.forward_ms, work))
            parts = backward_parts(shard, does, checkpointing)
            backward = (sum(part.base for part in parts), sum(slope(part, work) for part in parts))
            rows.append((0.0, 0.0, 0.0, 0.0) if work == NO_WORK else (*forward, *backward))
    return UnitTimes(*np.array(rows).T)


def backward_parts(
    shard: LayerShard, does: Backward, checkpointing: bool = False
) -> list[Polynomial]:
    """The times in ms that add up to a layer's backward."""
    if does == "still":
        return []
    if does == "passes":
        return [shard.backward_input_ms, *([shard.forward_ms] if checkpointing else [])]
    return [shard.backward_ms, *([shard.forward_ms, shard.recomputing_ms] if checkpointing else [])]
