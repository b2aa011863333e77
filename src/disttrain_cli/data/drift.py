"""Check for data drift: a run's data compared with the profile that its plan is based on.

The profile stores the sizes of some sequences, and the plan is optimal for their mean and spread.
Steps report sums over their sequences. A mean has moved if its distance from the profile's mean is
significant,

    z = (seen - planned) / (s · sqrt(1/N + 1/K)),

with s the spread between the profile's K sequences and N the sequences seen (the two-sample
standard error of a mean, as the profile's sequences are a sample too).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from disttrain_cli.spec.drift import Drift
from disttrain_cli.spec.profile import Profile, SizeSample

Floats = NDArray[np.float64]
LEAST_Z, LEAST_CHANGE_PCT = 4.0, 5.0  # both must be exceeded
RECENT_STEPS = 50  # the last steps are compared, or the second half of a shorter run
LEAST_SPREAD = 1e-3  # relative to the mean, if the profile's sequences are all alike


def drift(
    profile: Profile, steps: Sequence[Mapping[str, Any]], sizes: SizeSample | None = None
) -> list[Drift]:
    """Return the sizes that have moved significantly, the largest change first; none without steps.

    Only steps of the last phase are compared, with the profile's sizes of that phase.

    Args:
        profile: the profile of the plan.
        steps: in order; each with the sums `tokens`, `images`, `targets` over its `sequences`, and
            `step`.
        sizes: single sequences of the last steps (`recent`), if they were recorded: they show
            images and samples that have grown although their number is unchanged.
    """
    last = of_last_phase(profile, steps)
    planned = profile.data.phase_at(last[-1]["step"] if last else 0).sample
    assert planned is not None
    drifts = [
        *_from_steps(planned, last),
        *(_from_sizes(planned, sizes) if sizes is not None else []),
    ]
    return sorted(
        drifts, key=lambda one: -abs(one.change_pct if one.change_pct is not None else math.inf)
    )


def recent(steps: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the last steps, which show the data that the run reads now."""
    return steps[-min(RECENT_STEPS, -(-len(steps) // 2)) :] if steps else steps


def of_last_phase(
    profile: Profile, steps: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the steps in which sources are mixed as in the last one."""
    first = profile.data.phase_at(steps[-1]["step"]).step if steps else 0
    return [step for step in steps if step["step"] >= first]


def _from_steps(planned: SizeSample, steps: Sequence[Mapping[str, Any]]) -> list[Drift]:
    last = recent(steps)
    count = sum(step["sequences"] for step in last)
    if not count:
        return []
    drifts = []
    for what, column, values in (
        ("tokens per sequence", "tokens", planned.tokens),
        ("images read per sequence", "images", [len(images) for images in planned.images]),
        ("images generated per sequence", "targets", planned.targets),
    ):
        one = _judge(what, values, sum(step[column] for step in last) / count, count)
        if one is not None:
            sums, sequences = (
                np.array([step[name] for step in steps], dtype=float)
                for name in (column, "sequences")
            )
            since = _change(sums, sequences, one)
            drifts.append(replace(one, from_step=int(steps[since]["step"]) if since else None))
    return drifts


def _from_sizes(planned: SizeSample, seen: SizeSample) -> list[Drift]:
    """Compare single sequences: patches of an image, Σ length² of a sequence, audio clips."""
    before, now = (
        {
            "patches per image": [patches for image in sample.images for patches in image],
            "Σ length² per sequence": sample.length_sq,
            "audio clips per sequence": sample.clips,
        }
        for sample in (planned, seen)
    )
    drifts = [
        _judge(what, before[what], float(np.mean(now[what])), len(now[what]))
        for what in before
        if before[what] and now[what]
    ]
    return [one for one in drifts if one is not None]


def _judge(what: str, values: ArrayLike, seen: float, count: int) -> Drift | None:
    """Compare a mean of `count` sequences with the profile's values; None unless it has moved."""
    sample = np.asarray(values, dtype=float)
    planned = float(sample.mean())
    spread = max(float(sample.std()), LEAST_SPREAD * max(planned, seen))
    if seen == planned:
        return None
    z = (seen - planned) / (spread * math.sqrt(1 / count + 1 / len(sample)))
    change_pct = 100 * (seen - planned) / planned if planned else None
    if abs(z) <= LEAST_Z or (change_pct is not None and abs(change_pct) <= LEAST_CHANGE_PCT):
        return None
    return Drift(what=what, planned=planned, seen=seen, change_pct=change_pct, z=z)


def _change(sums: Floats, sequences: Floats, moved: Drift) -> int:
    """Return the number of the first step that belongs to the new mean rather than the old one.

    It is the maximum-likelihood change point for a step between two known means: where the
    cumulative sum over all earlier steps stays furthest on the old side of the midpoint (Page,
    Continuous inspection schemes, 1954).
    """
    away = (sums - sequences * (moved.planned + moved.seen) / 2) * math.copysign(
        1.0, moved.seen - moved.planned
    )
    return int(np.concatenate([[0.0], np.cumsum(away)])[:-1].argmin())
