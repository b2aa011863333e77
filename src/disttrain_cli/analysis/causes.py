"""Search for the causes that slow a job: recorded steps replayed without one suspect at a time.

A `Suspect` is one fault at one location. `find_causes` removes the suspect that saves most, then,
with that one removed, the next, until the rest saves nearly nothing. So causes that hide each other
are found too, and the rows' savings add up to the saving of removing all of them. Several suspects
of one kind are one finding if each alone saves little of what all of them save together: delayed
hosts everywhere, or two equally slow replicas.

Every finding also has its saving if it alone is removed, all else as recorded, and its saving
without its largest single event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.analysis.walk import Floats

#: A cause that costs less than this share of a step is no fault.
LEAST_SHARE = 0.05
#: As `LEAST_SHARE`, for upper bounds that cannot be reached: even work, where the data are ordered
#: already and cannot be cut.
LEAST_LIMIT_SHARE = 0.1
#: The search ends at suspects that save less than this share of a step.
SMALLEST_SHARE = 0.01
#: One suspect is a finding by itself if removing it saves this share of what removing all of its
#: kind saves.
ALONE_SHARE = 0.4
#: Of suspects of one kind, the fewest that save this share of what all of them save are named.
ENOUGH_SHARE = 0.9
#: Suspects of a kind that are replayed one by one; the others are removed together.
MOST_SUSPECTS = 8

#: Input of a replay: arrays of seconds, [nodes, steps] or [steps] each.
State = tuple[Floats, ...]


@dataclass(frozen=True)
class Suspect:
    """A possible fault; `mend` maps recorded times to the times without it."""

    cause: str
    place: Place
    mend: Callable[[State], State]
    # seconds per step that it adds to the rank where it adds most: the order in which locations are
    # named if they save time only together
    most_s: float = 0.0


@dataclass(frozen=True)
class Finding:
    """A cause and the seconds saved in every step by removing it."""

    cause: str
    places: list[Place]  # by saving alone, then by seconds added
    gain_s: Floats  # [steps] once the findings before it are removed
    alone_s: Floats  # [steps] all else as recorded
    # mean of `gain_s` without its largest single event; None: unknown
    rest_s: float | None = None
    limit: bool = False  # an upper bound: the true saving is less, by an unknown amount
    regained: bool = False  # reduced to what another plan or ordering saves

    @property
    def least_share(self) -> float:
        """Share of a step that it must save to be a fault."""
        return LEAST_LIMIT_SHARE if self.limit else LEAST_SHARE

    def claiming(self, share: float) -> Finding:
        """Return the finding with its savings reduced to a share, as only that can be regained."""
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
    """Return the causes that slow the steps, largest saving first, and the steps without them.

    Args:
        replay: returns the seconds of every step [steps] for times such as `recorded`.
        recorded: recorded times, the input of a replay.
        suspects: possible faults.
        least_share: share of a step that several suspects must save together to be one finding.
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
    """Return the times without any of these faults."""
    return reduce(lambda mended, one: one.mend(mended), suspects, state)


def _pick(
    replay: Callable[[State], Floats], state: State, now: Floats, left: list[Suspect], least: float
) -> list[Suspect]:
    """Return the suspects to remove next: one, or several that save time only together."""

    def gain(some: Sequence[Suspect]) -> float:
        return float((now - replay(mend(state, some))).mean())

    gains = [gain([one]) for one in left]
    best = int(np.argmax(gains))
    kinds = {one.cause: [other for other in left if other.cause == one.cause] for one in left}
    kind_gains = {cause: gain(alike) for cause, alike in kinds.items() if len(alike) > 1}
    together = max(kind_gains, key=lambda cause: kind_gains[cause], default=None)
    alone = gains[best] >= least and gains[best] >= ALONE_SHARE * kind_gains.get(
        left[best].cause, 0.0
    )
    if alone and (together in (None, left[best].cause) or gains[best] >= kind_gains[together]):
        return [left[best]]
    if together is not None and kind_gains[together] >= least:
        return _fewest(gain, kinds[together], kind_gains[together])
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
    """Sort suspects that save time together, largest saving alone first.

    Those that save nothing alone follow, by the seconds that they add.
    """
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
    """Drop suspects, those that add least first, while the rest save `ENOUGH_SHARE` of `all_s`."""
    kept = suspects
    for one in sorted(suspects, key=lambda one: one.most_s):
        without = [other for other in kept if other is not one]
        if without and gain(without) >= ENOUGH_SHARE * all_s:
            kept = without
    return kept


def _without_largest(before: State, mended: State) -> State | None:
    """Return `before` with only its largest single event removed; None if there is one step only.

    The event is the one time that differs most between `before` and `mended`.
    """
    if before[0].shape[1] < 2:
        return None
    shorter = [was - is_now for was, is_now in zip(before, mended, strict=True)]
    most = int(np.argmax([times.max(initial=0.0) for times in shorter]))
    at = np.unravel_index(int(np.argmax(shorter[most])), shorter[most].shape)
    changed = before[most].copy()
    changed[at] = mended[most][at]
    return (*before[:most], changed, *before[most + 1 :])
