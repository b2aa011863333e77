"""Comparison of two runs: figures of their analyses, and step times by operation and kernel."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from disttrain_cli.analysis.result.summary import Analysis
from disttrain_cli.analysis.sampled import WHOLE, Key, Samples, Series
from disttrain_cli.analysis.significance import LEVEL, Difference, difference, holm

#: No change in percent is given if the figure after exceeds the one before this many times, as the
#: latter is practically zero.
MOST_CHANGE = 1e4


#: Kernels that take less than this share of a step in both runs are summed in one row.
LEAST_SHARE = 1e-3
MEASURES = ("step", "kind", "operation", "kernel")


class Change(Struct, frozen=True, kw_only=True):
    """One figure in both analyses; null if one of them lacks it.

    There is no percentage from zero or between figures of different signs.
    """

    what: str
    before: float | None
    after: float | None
    change_pct: float | None


def compare(before: Analysis, after: Analysis) -> list[Change]:
    """Compare the figures of the job, of every unit that both runs have, and of the losses."""
    rows = [
        _change(f"job.{name}", getattr(before.job, name), getattr(after.job, name))
        for name in (
            "ranks",
            "iteration_s",
            "sequences_per_s",
            "mfu",
            "bubble_fraction",
            "exposed_communication_fraction",
        )
    ]
    rows.append(
        _change("stragglers.slowdown", before.stragglers.slowdown, after.stragglers.slowdown)
    )
    rows += [
        _change(f"stragglers.lost_s.{cause}", _lost_s(before, cause), _lost_s(after, cause))
        for cause in before.stragglers.lost_s or after.stragglers.lost_s or {}
    ]
    others = {unit.name: unit for unit in after.units}
    for unit in before.units:
        other = others.get(unit.name)
        if other is not None:
            rows += [
                _change(f"units.{unit.name}.{name}", getattr(unit, name), getattr(other, name))
                for name in ("gpus", "mfu", "busy_fraction", "compute_s", "data_wait_s")
            ]
    return rows


def _lost_s(analysis: Analysis, cause: str) -> float | None:
    """Return the seconds lost to a cause; None if the traces do not contain them."""
    stragglers = analysis.stragglers
    return None if cause in stragglers.not_recorded else (stragglers.lost_s or {}).get(cause)


def _change(what: str, before: float | None, after: float | None) -> Change:
    pct = None
    if (
        before is not None
        and after is not None
        and before * after >= 0
        and abs(before) > abs(after) / MOST_CHANGE
    ):
        pct = 100 * (after - before) / abs(before)
    return Change(what=what, before=before, after=after, change_pct=pct)


class TimeChange(Struct, frozen=True, kw_only=True):
    """Seconds per step of an operation or a kernel in both runs; null if one lacks it."""

    measure: str  # step, kind, operation or kernel
    name: str
    before_s: float | None
    after_s: float | None
    difference_s: float | None
    low_s: float | None  # 95 % interval of the difference; null if there are too few steps
    high_s: float | None
    p: float | None  # uncorrected for the step; for all other rows Holm's, over those rows
    significant: bool | None


class Times(Struct, frozen=True, kw_only=True):
    """Comparison of the steps of two runs.

    The step is the primary comparison, chosen before any result, so its p-value is not corrected.
    """

    test: str = (
        "Welch's t-test of batch means over steps at 5 %: the step as the primary comparison"
        " without correction, all other rows with Holm's correction among themselves; intervals are"
        " per row"
    )
    formats: list[str]  # before, after
    steps: list[int]
    rows: list[TimeChange]


def compare_times(before: Samples, after: Samples) -> Times:
    """Compare step, kinds, operations and kernels; the largest differences of each come first."""
    first, second = _without_small(*_with_nothing(before, after))
    found: dict[Key, Difference | None] = {
        key: difference(first[key], second[key]) if key in first and key in second else None
        for key in [*first, *(key for key in second if key not in first)]
    }
    others = holm([one.p if one and key != WHOLE else None for key, one in found.items()])
    rows = [
        TimeChange(
            measure=key[0],
            name=key[1],
            before_s=_mean(first.get(key)),
            after_s=_mean(second.get(key)),
            difference_s=None if one is None else one.mean,
            low_s=None if one is None else one.low,
            high_s=None if one is None else one.high,
            p=p,
            significant=None if p is None else p < LEVEL,
        )
        for (key, one), corrected in zip(found.items(), others, strict=True)
        for p in [one.p if one and key == WHOLE else corrected]
    ]
    rows.sort(key=lambda row: (MEASURES.index(row.measure), -_size(row), row.name))
    return Times(
        formats=[before.format, after.format], steps=[before.steps, after.steps], rows=rows
    )


def _with_nothing(before: Samples, after: Samples) -> tuple[Series, Series]:
    """Add zeros to both series for keys that only the other one has.

    Only keys that both runs would name alike are added: kernels, and all others if the traces have
    one format.
    """

    def filled(own: Samples, other: Samples) -> Series:
        lengths = {key[0]: len(values) for key, values in own.series.items()}
        return own.series | {
            key: np.zeros(lengths[key[0]])
            for key in other.series
            if key not in own.series
            and key[0] in lengths
            and (key[0] == "kernel" or own.format == other.format)
        }

    return filled(before, after), filled(after, before)


def _without_small(before: Series, after: Series) -> tuple[Series, Series]:
    """Sum the kernels that take less than `LEAST_SHARE` of a step in both runs in one row."""
    step_s = max(_mean(one.get(WHOLE)) or 0.0 for one in (before, after))
    means: dict[Key, float] = {}
    for one in (before, after):
        for key, values in one.items():
            means[key] = max(means.get(key, 0.0), float(values.mean()))
    small = {
        key for key, mean in means.items() if key[0] == "kernel" and mean < LEAST_SHARE * step_s
    }
    if len(small) < 2:
        return before, after
    name = f"{len(small)} others, each below {100 * LEAST_SHARE:g} % of a step"

    def put_together(series: Series) -> Series:
        kept: Series = {key: values for key, values in series.items() if key not in small}
        there = [values for key, values in series.items() if key in small]
        return kept | ({("kernel", name): np.sum(there, axis=0)} if there else {})

    return put_together(before), put_together(after)


def _mean(values: NDArray[np.float64] | None) -> float | None:
    return None if values is None or not len(values) else float(values.mean())


def _size(row: TimeChange) -> float:
    """Return a row's absolute difference, or all of its time if one run lacks it, for sorting."""
    if row.difference_s is not None:
        return abs(row.difference_s)
    return row.before_s or row.after_s or 0.0
