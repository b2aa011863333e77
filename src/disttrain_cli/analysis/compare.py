"""Two analyses side by side: before and after."""

from __future__ import annotations

from msgspec import Struct

from disttrain_cli.analysis.result import Analysis

#: Beyond this many times the figure before, which then is as good as nothing, a change in percent says nothing.
MOST_CHANGE = 1e4


class Change(Struct, frozen=True, kw_only=True):
    """One figure in both analyses; null where one of them lacks it, or there is no percentage."""

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
    rows.append(_change("stragglers.slowdown", before.stragglers.slowdown, after.stragglers.slowdown))
    for cause in before.stragglers.lost_s or {}:
        rows.append(
            _change(
                f"stragglers.lost_s.{cause}",
                (before.stragglers.lost_s or {}).get(cause),
                (after.stragglers.lost_s or {}).get(cause),
            )
        )
    others = {unit.name: unit for unit in after.units}
    for unit in before.units:
        other = others.get(unit.name)
        if other is not None:
            rows += [
                _change(f"units.{unit.name}.{name}", getattr(unit, name), getattr(other, name))
                for name in ("gpus", "mfu", "busy_fraction", "compute_s", "data_wait_s")
            ]
    return rows


def _change(what: str, before: float | None, after: float | None) -> Change:
    told = before is not None and after is not None and abs(before) > MOST_CHANGE**-1 * abs(after)
    pct = 100 * (after - before) / abs(before) if told and before is not None and after is not None else None
    return Change(what=what, before=before, after=after, change_pct=pct)
