"""Selection of the steps for losses and verdict: complete and typical ones.

A verdict is about the typical step. One step of several that loses much more than the others (a
checkpoint, a network stall) is no evidence about them: it is reported in addition to the verdict.
Two such steps may be a recurring cause, and are included.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = dict[str, Any]
#: The last step of a rank is incomplete with a smaller share of the kernels of its other steps.
LEAST_COMPLETE = 0.5
#: A single event would add at least this share of a usual step to the mean step.
LEAST_EVENT = 0.05
#: No other step exceeds the median by a larger share of what the event does.
MOST_OTHER = 0.5
#: With fewer steps none is typical.
LEAST_STEPS = 3


@dataclass(frozen=True)
class SingleEvent:
    """A step that loses more than the others."""

    step: int
    steps: int  # number of measured steps
    longer_s: float  # beyond the median, mean over the ranks
    rank: int | None  # rank that the others wait for


@dataclass(frozen=True)
class JudgedSteps:
    """Rows of `step_times` of the judged steps, and what was left out."""

    rows: list[Row]
    steps: list[int | None]
    event: SingleEvent | None = None
    incomplete: int | None = None  # number of the last step, if that was left out

    @property
    def played(self) -> list[int | None]:
        """Steps whose collectives are compared, an incomplete last one included.

        The collectives of an incomplete step are all recorded, or they differ from the others' and
        are ignored.
        """
        return self.steps if self.incomplete is None else [*self.steps, self.incomplete]


def judged_steps(rows: list[Row], unended: int | None = None) -> JudgedSteps:
    """Leave out an incomplete last step, then the step of a single event.

    Args:
        rows: `step_times`, by rank and step.
        unended: the last step, if steps continue after their marks and no further mark ends it.
    """
    incomplete = _incomplete(rows, unended)
    rows = [row for row in rows if incomplete is None or row["step"] != incomplete]
    event = _single_event(rows)
    rows = [row for row in rows if event is None or row["step"] != event.step]
    steps = list(dict.fromkeys(row["step"] for row in rows if row["step"] is not None))
    return JudgedSteps(rows, list(steps) or [None], event, incomplete)


def _incomplete(rows: list[Row], unended: int | None) -> int | None:
    of_rank = defaultdict[int, list[Row]](list)
    for row in rows:
        of_rank[row["rank"]].append(row)
    for own in of_rank.values():
        *others, last = own
        if others and last["step"] == unended:
            return unended
        if others and last["kernels"] < LEAST_COMPLETE * median(row["kernels"] for row in others):
            return int(last["step"])
    return None


def _single_event(rows: list[Row]) -> SingleEvent | None:
    of_step = defaultdict[int | None, list[Row]](list)
    for row in rows:
        of_step[row["step"]].append(row)
    of_step.pop(None, None)
    if len(of_step) < LEAST_STEPS:
        return None
    lost = {
        step: _mean(row["step_ns"] - row["compute_ns"] for row in own)
        for step, own in of_step.items()
    }
    usual_ns = median(_mean(row["step_ns"] for row in own) for own in of_step.values())
    second, most = sorted(lost, key=lambda step: lost[step])[-2:]
    usual = median(lost.values())
    longer = lost[most] - usual
    if longer < LEAST_EVENT * len(of_step) * usual_ns or lost[second] - usual > MOST_OTHER * longer:
        return None
    own = of_step[most]
    waits = sorted(own, key=lambda row: row["exposed_wait_ns"])
    lone = len(own) > 1 and waits[1]["exposed_wait_ns"] - waits[0]["exposed_wait_ns"] > longer / 2
    return SingleEvent(
        int(most or 0), len(of_step), longer / 1e9, waits[0]["rank"] if lone else None
    )


def _mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
