"""Which causes slow a job, by what mending each of them gains: recorded steps replayed without one
of them at a time.

A `Suspect` is one thing that could be mended, at one place. `find_causes` mends the one that gains
most, then, with that mended, the next, until nothing is left that gains. So causes that hide each
other are found too, and what the rows claim adds up to what mending all of them gains. Several
suspects of a kind are one finding where each alone gains little of what all of them do: late hosts
everywhere, or two equally slow replicas.

Of every finding it is also known what it gains alone, all else as recorded, and what of it hangs on
a single event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.analysis.walk import Floats

#: A cause that gains less than this share of a step is no fault.
LEAST_SHARE = 0.05
#: The same of what is a limit that nobody reaches: even work, where the data are ordered already
#: and cannot be cut.
LEAST_LIMIT_SHARE = 0.1
#: What gains less than this share is not looked at any more.
SMALLEST_SHARE = 0.01
#: One suspect is named alone where mending it gains this share of what mending all of its kind
#: does.
ALONE_SHARE = 0.4
#: The fewest suspects of a kind are named that gain this share of what all of them do.
ENOUGH_SHARE = 0.9
#: Suspects of a kind that are looked at one by one; the others are mended together.
MOST_SUSPECTS = 8

#: Times that a replay takes, [nodes, steps] or [steps] each.
State = tuple[Floats, ...]


@dataclass(frozen=True)
class Suspect:
    """One thing that could be mended."""

    cause: str
    place: Place
    mend: Callable[[State], State]
    # seconds per step that it adds where it adds most: the order in which places are named that
    # gain only together
    most_s: float = 0.0


@dataclass(frozen=True)
class Finding:
    """A cause and what mending it gains, seconds by step."""

    cause: str
    places: list[Place]  # those that gain most alone first, then those that add most
    gain_s: Floats  # once the findings before it are mended
    alone_s: Floats  # all else as recorded
    # mean of `gain_s` if its largest single event had not happened; None: not told
    rest_s: float | None = None
    limit: bool = False  # whether mending gains less than that: how much less is not known
    regained: bool = False  # whether it claims only what another plan or ordering regains of it

    @property
    def least_share(self) -> float:
        """Of a step, what it must gain to be a fault."""
        return LEAST_LIMIT_SHARE if self.limit else LEAST_SHARE

    def claiming(self, share: float) -> Finding:
        """The same, of which only a share can be regained."""
        return replace(
            self,
            gain_s=self.gain_s * share,
            alone_s=self.alone_s * share,
            regained=True,
            rest_s=None if self.rest_s is None else self.rest_s * share,
        )


def find_causes(
    replay: Callable[[State], Floats],
    recorded: State,
    suspects: Sequence[Suspect],
    least_share: float = LEAST_SHARE,
) -> tuple[list[Finding], State]:
    """What slows the steps, what gains most first, and the steps with all of it mended.

    Args:
        replay: seconds of every step [steps] of times as in `recorded`.
        suspects: what could be mended.
        least_share: of a step, what several suspects must gain to be one finding.
    """
    first = now = replay(recorded)
    least, smallest = least_share * first.mean(), SMALLEST_SHARE * first.mean()
    state, left, findings = recorded, list(suspects), list[Finding]()
    while left:
        picked = _ranked(replay, state, now, _pick(replay, state, now, left, least), smallest)
        kinds = {
            cause: [one for one in picked if one.cause == cause]
            for cause in dict.fromkeys(one.cause for one in picked)
        }
        mended_s = {
            cause: float(replay(mend(state, alike)).mean()) for cause, alike in kinds.items()
        }
        for cause in sorted(kinds, key=lambda cause: mended_s[cause]):
            alike = kinds[cause]
            mended = mend(state, alike)
            then = replay(mended)
            gain_s = now - then
            if len(picked) == len(alike) and gain_s.mean() < smallest:
                return findings, state
            rest = _without_largest(state, mended)
            findings.append(
                Finding(
                    cause,
                    [one.place for one in alike],
                    gain_s,
                    first - replay(mend(recorded, alike)) if findings else gain_s,
                    None if rest is None else float((replay(rest) - then).mean()),
                )
            )
            state, now = mended, then
        left = [one for one in left if one not in picked]
    return findings, state


def mend(state: State, suspects: Sequence[Suspect]) -> State:
    """Times without any of these."""
    return reduce(lambda mended, one: one.mend(mended), suspects, state)


def _pick(
    replay: Callable[[State], Floats], state: State, now: Floats, left: list[Suspect], least: float
) -> list[Suspect]:
    """What to mend next: one suspect, or several that gain together only."""

    def gain(some: Sequence[Suspect]) -> float:
        return float((now - replay(mend(state, some))).mean())

    gains = [gain([one]) for one in left]
    best = int(np.argmax(gains))
    kinds = {one.cause: [other for other in left if other.cause == one.cause] for one in left}
    whole = {cause: gain(alike) for cause, alike in kinds.items() if len(alike) > 1}
    together = max(whole, key=lambda cause: whole[cause], default=None)
    alone = gains[best] >= least and gains[best] >= ALONE_SHARE * whole.get(left[best].cause, 0.0)
    if alone and (together in (None, left[best].cause) or gains[best] >= whole[together]):
        return [left[best]]
    if together is not None and whole[together] >= least:
        return _fewest(gain, kinds[together], whole[together])
    if gains[best] < least and len(kinds) > 1 and (all_s := gain(left)) >= least:
        return _fewest(gain, left, all_s)
    return [left[best]]


def _ranked(
    replay: Callable[[State], Floats],
    state: State,
    now: Floats,
    picked: list[Suspect],
    smallest: float,
) -> list[Suspect]:
    """Suspects that gain together: those first that gain most alone, where any does, then those
    that add most."""
    if len(picked) == 1:
        return picked
    gains = {id(one): float((now - replay(mend(state, [one]))).mean()) for one in picked}
    return sorted(
        picked,
        key=lambda one: (-gains[id(one)] if gains[id(one)] >= smallest else 0.0, -one.most_s),
    )


def _fewest(
    gain: Callable[[Sequence[Suspect]], float], suspects: list[Suspect], all_s: float
) -> list[Suspect]:
    """The suspects without those that the gain does not need."""
    kept = suspects
    for one in sorted(suspects, key=lambda one: one.most_s):
        without = [other for other in kept if other is not one]
        if without and gain(without) >= ENOUGH_SHARE * all_s:
            kept = without
    return kept


def _without_largest(before: State, mended: State) -> State | None:
    """As before, but for the one time that mending shortens most; None where there is one step
    only."""
    if before[0].shape[1] < 2:
        return None
    shorter = [was - is_now for was, is_now in zip(before, mended, strict=True)]
    most = int(np.argmax([times.max(initial=0.0) for times in shorter]))
    at = np.unravel_index(int(np.argmax(shorter[most])), shorter[most].shape)
    changed = before[most].copy()
    changed[at] = mended[most][at]
    return (*before[:most], changed, *before[most + 1 :])
