"""Suspects in recorded passes of any format: slow ranks and stages, uneven work.

Removing a suspect divides its factor of `losses.Explained` out of the passes' times, so removing
several divides out all of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from disttrain_cli.analysis.causes import MOST_SUSPECTS, State, Suspect
from disttrain_cli.analysis.graph import Passes, group_mean
from disttrain_cli.analysis.losses import Explained, ratio
from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.analysis.walk import Floats, Ints


class Scale(Protocol):
    """Function that scales the passes' times in a replay's input and adds seconds to them.

    Factor and seconds are [passes, steps].
    """

    def __call__(self, state: State, factor: Floats, more: Floats) -> State: ...


def of_passes(
    passes: Passes, why: Explained, scale: Scale, where: Mapping[int, Place]
) -> Iterator[Suspect]:
    """Yield uneven work and stages by unit, and ranks that are slow for their work.

    Args:
        passes: passes of a step.
        why: `explain` of their times.
        scale: scales the times of the passes.
        where: location of every rank.
    """
    units = np.asarray(passes.unit)

    none, ones = np.zeros_like(why.worked), np.ones_like(why.worked)
    ranks = passes.groups("rank", "operation")
    level = why.mean * why.slot  # for replicas without work in a slot, which would get some
    missing = np.where(
        why.worked > 0,
        0.0,
        level * ratio(group_mean(why.ranked, ranks), group_mean(why.worked, ranks)),
    )

    def suspect(cause: str, unit: str, factor: Floats, more: Floats = none) -> Suspect:
        mask = (units == unit)[:, None]
        times, extra = np.where(mask, factor, 1.0), np.where(mask, more, 0.0)
        return Suspect(
            cause,
            Place(unit=unit),
            lambda state: scale(state, times, extra),
            most_s(passes, why.staged * (1 - times)),
        )

    for unit in dict.fromkeys(passes.unit):
        yield suspect("intra_microbatch", unit, ratio(ones, why.intra), missing)
        yield suspect("inter_microbatch", unit, ratio(ones, why.slot))
        if len(np.unique(passes.stage[units == unit])) > 1:
            yield suspect("stage", unit, ratio(why.worked, why.staged))
    faster = np.minimum(1.0, ratio(why.staged, why.ranked))
    yield from by_rank(
        "worker",
        passes.rank,
        where,
        why.ranked * (1 - faster),
        lambda pick: lambda state: scale(state, np.where(pick[:, None], faster, 1.0), none),
    )


def by_rank(
    cause: str,
    ranks: Ints,
    where: Mapping[int, Place],
    added: Floats,
    mend: Callable[[NDArray[np.bool_]], Callable[[State], State]],
) -> list[Suspect]:
    """Return a suspect for every rank to which most is added, and one for all others.

    Args:
        cause: the suspects' cause.
        ranks: rank of every operation [operations].
        where: location of every rank.
        added: seconds of every operation [operations, steps].
        mend: returns the function that removes the fault from the operations of a mask.
    """
    sums = {int(rank): float(added[ranks == rank].sum(axis=0).mean()) for rank in np.unique(ranks)}
    order = sorted((rank for rank in sums if sums[rank] > 0), key=lambda rank: -sums[rank])
    suspects = [
        Suspect(cause, where.get(rank, Place(rank=rank)), mend(ranks == rank), sums[rank])
        for rank in order[:MOST_SUSPECTS]
    ]
    if others := order[MOST_SUSPECTS:]:
        suspects.append(
            Suspect(
                cause,
                common([where.get(rank, Place()) for rank in others]),
                mend(np.isin(ranks, others)),
                0.0,
            )
        )
    return suspects


def most_s(passes: Passes, added: Floats) -> float:
    """Return the seconds per step added to the passes of the rank with most."""
    _, numbers = np.unique(passes.rank, return_inverse=True)
    return float(np.bincount(numbers, added.clip(0.0).mean(axis=1)).max(initial=0.0))


def common(places: list[Place]) -> Place:
    """Return the fields that several locations have in common."""
    first = places[0]
    return replace(
        first,
        **{
            name: None
            for name in first.__struct_fields__
            if any(getattr(place, name) != getattr(first, name) for place in places)
        },
    )
