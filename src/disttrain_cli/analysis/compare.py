"""Two analyses side by side: before and after."""

from __future__ import annotations

from msgspec import Struct

from disttrain_cli.analysis.result.summary import Analysis

#: Beyond this many times the figure before, which then is as good as nothing, a change in percent
#: says nothing.
MOST_CHANGE = 1e4


class Change(Struct, frozen=True, kw_only=True):
    """One figure in both analyses; null where one of them lacks it. No percentage: from nothing, or
    of another sign."""

    what: str
    before: float | None
    after: float | None
    change_pct: float | None


def compare(before: Analysis, after: Analysis) -> list[Change]:
    """Rows of the job, of every unit that both have, and of the losses."""
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
    """What a cause costs; null where the traces do not tell it."""
    stragglers = analysis.stragglers
    return None if cause in stragglers.not_told else (stragglers.lost_s or {}).get(cause)


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
