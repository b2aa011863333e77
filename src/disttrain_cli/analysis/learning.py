"""Verdict on whether a run learns, from its recorded losses.

A loss of one batch is noisy, so medians of some first and last steps are compared, and the trend of
the last half of the steps. Their errors follow from the differences of successive steps and blocks
of steps, which a trend hardly affects; blocks, because the noise of neighbouring steps may be
correlated. Held-out losses are of the same sequences and noise every time; how much they swing is
seen in the rises from which they have recovered.

No verdict is bad before `SETTLED` steps after the warm-up, except diverging. If a run continues
from steps that are not recorded, a flat loss may have been learned before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.figures import figure
from disttrain_cli.spec.learning import Learning, LossCourse, Verdict
from disttrain_cli.spec.profile import LossToBeat, Profile

Floats = NDArray[np.float64]
TEXT = "text"
ORDER: tuple[Verdict, ...] = (
    "diverging",
    "not learning",
    "overfitting",
    "too early to say",
    "learning",
)
#: Steps since the highest learning rate was reached before any verdict but diverging.
SETTLED = 30
LEAST = 20  # steps before any verdict, except on losses that are not finite
#: As SETTLED, for a loss that has fallen, but not below the one to beat: it may be on a plateau.
PLATEAU = 100
FIRST, LAST = 25, 200  # most steps in the medians at the start and end of a course
#: BLOCK: steps over which noise may be correlated. CORRELATED: it counts as correlated if means of
#: BLOCK steps vary this many times more than those of independent steps.
BLOCK, CORRELATED = 8, 2
SIGMAS = 3.0
#: Shares of a loss: MOVED is the least change that counts; a loss is flat if its change, with the
#: error added, is below HIDDEN.
MOVED, HIDDEN = 0.01, 0.02
#: A loss within this share of the one to beat has not beaten it.
BEATEN = 0.03
#: Overfitting: WORSE is the least rise of the held-out loss above its best, as a share, at two
#: evaluations; BY_HEART is the share of the held-out loss below which a training loss is memorised.
WORSE, BY_HEART = 0.03, 0.5
SWINGS = 2  # least such rise, in multiples of the held-out loss's largest swing
#: Diverging: least rise above the best loss, as a share of the best (RISEN) and of what was learned
#: (LOST).
RISEN, LOST = 0.25, 0.5


class Course(NamedTuple):
    """Recorded losses of one name."""

    steps: Floats
    values: Floats
    held_out: list[tuple[int, float]]


def learning(
    rows: Sequence[Mapping[str, Any]],
    profile: Profile,
    batch: int,
    answers: tuple[int, int] | None = None,
) -> Learning:
    """Judge a run by the steps of its last data phase.

    Args:
        rows: rows of `job.files.recorded_steps`.
        batch: sequences of a global batch.
        answers: of held-out conversations: number of right answers, and of all.
    """
    begin = profile.data.phase_at(rows[-1]["step"]).step if rows else 0
    rows = [row for row in rows if row["step"] >= begin]
    if not rows:
        return Learning("too early to say")
    rates = np.array([_rate(row) for row in rows])
    settled = len(rows) - int(np.argmax(rates >= rates.max() * (1 - 1e-9)))
    passes = (rows[-1]["step"] + 1) * batch / max(1, profile.data.sequences)
    known = begin == 0 and rows[0]["step"] == 0
    bars: dict[str, LossToBeat] = {bar.loss: bar for bar in profile.data.losses_to_beat}
    courses = [
        _course(name, course, bars.get(name if name == TEXT else "image"), settled, known, passes)
        for name, course in _courses(rows, profile).items()
    ]
    verdict = _worst(one.verdict for one in courses)
    if answers is not None and answers[1]:
        right = f"{answers[0]} of {answers[1]} held-out answers correct"
        courses = [
            replace(one, why=f"{one.why}, {right}") if one.loss == TEXT else one for one in courses
        ]
    return Learning(verdict, len(rows), courses, _advice(verdict, float(rates.max()), passes))


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on all losses, the worst first.

    A loss on which it is too early to say does not hide that another one learns.
    """
    there = set(verdicts)
    if "learning" in there:
        there.discard("too early to say")
    return next((one for one in ORDER if one in there), "too early to say")


def _rate(row: Mapping[str, Any]) -> float:
    """Return the highest learning rate of a step."""
    return max([rate for _, rate in _pairs(row["learning_rates"])] or [row["learning_rate"] or 0.0])


def _pairs(value: Any) -> list[tuple[str, float]]:
    """Return the entries of a map, in Arrow's or Python's representation."""
    return list(value.items()) if isinstance(value, dict) else list(value or [])


def _courses(rows: Sequence[Mapping[str, Any]], profile: Profile) -> dict[str, Course]:
    """Return the courses of the losses that training can change, by name.

    Left out are losses whose modules are all frozen, losses of zero weight, and steps without any
    items for a loss, which are recorded as zero.
    """
    rated = {name for row in rows for name, rate in _pairs(row["learning_rates"]) if rate}
    several = sorted({name for row in rows for name, _ in _pairs(row["generator_losses"])})
    names = [TEXT] if not rated or rated - set(profile.inputs.generators) else []
    courses = {}
    for name in [*names, *(several or ["image"])]:
        losses = [
            (
                row["step"],
                dict(_pairs(row["generator_losses"])).get(name)
                if name in several
                else row[f"loss_{name}"],
            )
            for row in rows
        ]
        found = [(step, loss) for step, loss in losses if loss]  # 0: the batch had none
        if not found:
            continue
        held = f"evaluation_loss_{name}"
        courses[name] = Course(
            np.array([step for step, _ in found], float),
            np.array([loss for _, loss in found], float),
            [
                (row["step"], row[held])
                for row in rows
                if row.get(held) is not None and math.isfinite(row[held])
            ],
        )
    return courses


def _course(
    name: str, course: Course, bar: LossToBeat | None, settled: int, known: bool, passes: float
) -> LossCourse:
    """Judge one loss.

    Args:
        settled: steps since the learning rate was first at its highest.
        known: True if the first recorded step is the first trained step.
        passes: passes over the data so far.
    """
    judged = LossCourse(
        name,
        "too early to say",
        "",
        to_beat=bar.value if bar else None,
        basis=bar.basis if bar else "",
        held_out=course.held_out,
    )
    finite = np.isfinite(course.values)
    if finite[-20:].mean() < 0.8 or not finite[-3:].any():
        return replace(judged, verdict="diverging", why="is not finite in the last steps")
    values = course.values[finite]
    count = len(values)
    if count < LEAST:
        return replace(judged, why=f"{_steps(count)} so far")
    begin = values[: min(FIRST, max(5, count // 4))]
    end = values[-min(LAST, max(5, count // 5)) :]
    noise = _noise(values)
    of_blocks = _noise(_means(values)) * math.sqrt(BLOCK)
    noise = of_blocks if of_blocks > CORRELATED * noise else noise
    # a median's error is 1.25 times a mean's
    error = 1.25 * noise * math.sqrt(1 / len(begin) + 1 / len(end))
    first, last = float(np.median(begin)), float(np.median(end))
    trend = _trend(values[-min(2 * LAST, max(5, count // 2)) :], noise)
    judged = replace(judged, first=first, last=last, error=error)
    summary = f"{figure(first, 4)} → {figure(last, 4)} over {_steps(count)}"
    # a loss to beat of 0 cannot be beaten: frequencies of labels alone predict them
    beat = bar is None or not bar.value or last < (1 - BEATEN) * bar.value
    if bar is not None:
        summary += f", loss to beat {figure(bar.value, 4)} ({bar.basis})"
    held = [loss for _, loss in course.held_out]
    best = int(np.argmin(held)) if held else 0
    if held:
        summary += f", held out {figure(held[-1], 4)}"
    judged = replace(judged, why=summary)
    if _diverges(values, len(end), error, trend):
        return replace(judged, verdict="diverging")
    if settled < SETTLED:
        return replace(judged, why=f"{summary}; {_steps(settled)} since the warm-up")
    risen = len(held) > best + 2 and min(held[-2:]) - held[best] > max(
        WORSE * held[best], SWINGS * _swing(np.array(held), best)
    )
    if risen and last < held[-1]:
        since = course.held_out[best][0]
        why = f"{summary}, which was {figure(held[best], 4)} after step {since}"
        return replace(judged, verdict="overfitting", why=why)
    by_heart = passes > 1 and len(held) > 2 and last < BY_HEART * held[-1]
    if by_heart and min(held[-2:]) > (1 - MOVED) * min(held[:-2]):
        return replace(judged, verdict="overfitting", why=f"{summary}, which no longer falls")
    fell = first - last > max(SIGMAS * error, MOVED * first)
    fell |= len(held) > 1 and held[-1] < (1 - MOVED) * held[0]
    # a fall within fewer steps than the first median spans
    fell |= values[:2].min() - last > max(2 * SIGMAS * noise, MOVED * first)
    falls = trend < -2
    if not beat:
        if falls:
            return replace(judged, why=f"{summary}; it is still falling")
        if fell and settled < PLATEAU:
            return replace(judged, why=f"{summary}; {_steps(settled)} since the warm-up")
        return replace(judged, verdict="not learning")
    if fell:
        return replace(judged, verdict="learning")
    stands = first - last + 2 * error < HIDDEN * first or (
        len(held) > 2 and max(held) - min(held) < 0.2 * MOVED * held[0]
    )
    # text only: the loss of a generator that was trained before shows little of what it learns
    if stands and known and name == TEXT and not falls:
        return replace(judged, verdict="not learning")
    return replace(judged, why=f"{summary}; a change of {figure(2 * error, 2)} is within the noise")


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"


def _noise(values: Floats) -> float:
    """Return the standard deviation of a loss between steps, robust to few spikes and a trend."""
    steps = np.diff(values)
    return 1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(2)


def _means(values: Floats) -> Floats:
    """Return means of successive blocks of steps, the last of which ends with the last step."""
    return values[len(values) % BLOCK :].reshape(-1, BLOCK).mean(axis=1)


def _swing(held: Floats, best: int) -> float:
    """Return the largest rise from which a held-out loss recovered, or fall since its best."""
    before, since = held[: best + 1], held[best:]
    return float(
        max(
            (before - np.minimum.accumulate(before)).max(),
            (np.maximum.accumulate(since) - since).max(),
        )
    )


def _trend(values: Floats, noise: float) -> float:
    """Return the slope of a line through the values over its standard error.

    Spikes are clipped to four sigmas.
    """
    middle = float(np.median(values))
    cut = np.clip(values, middle - 4 * noise, middle + 4 * noise) if noise else values
    at = np.arange(len(cut)) - (len(cut) - 1) / 2
    slope = float((at * cut).sum() / (at**2).sum())
    left = cut - cut.mean() - slope * at
    error = math.sqrt(float((left**2).mean()) / float((at**2).sum()))
    return slope / error if error else 0.0


def _diverges(values: Floats, width: int, error: float, trend: float) -> bool:
    """Return True if the last two blocks of steps lie clearly above the best block, without a fall.

    Clearly means by more than four errors, `RISEN` of the best and `LOST` of what was learned.
    """
    starts = range(len(values) % width, len(values), width)
    blocks = [float(np.median(values[at : at + width])) for at in starts]
    if len(blocks) < 3 or trend < -2:
        return False
    best = min(blocks)
    limit = best + max(4 * error, RISEN * best, LOST * (blocks[0] - best))
    return min(blocks[-2:]) > limit


def _advice(verdict: Verdict, rate: float, passes: float) -> str:
    """Return the fields and data to look at."""
    if verdict == "not learning":
        return (
            f"Check optimizer.lr ({rate:.3g} at most), model.trained, and what the model is"
            " trained on (the chat template, data.sources: disttrain data check)."
        )
    if verdict == "diverging":
        return (
            f"Check optimizer.lr ({rate:.3g} at most), optimizer.warmup_steps,"
            " train.gradient_clipping and train.precision."
        )
    if verdict == "overfitting":
        return (
            f"{passes:.3g} passes over the data so far: train for fewer (train.epochs), keep the"
            " best checkpoint (train.evaluation.keep_best, stop_after), or add data or"
            " optimizer.weight_decay."
        )
    return ""
