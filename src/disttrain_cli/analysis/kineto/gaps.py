"""Long gaps of a device: the longest one of each step, and the host's activity during it."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from disttrain_cli.analysis.figures import seconds
from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.kineto.losses import Losses
from disttrain_cli.analysis.kineto.steps import Row, SingleEvent

#: One gap in each step explains a loss if it is this share of it.
LEAST_OF_LOSS = 2 / 3
LONGEST_NAME = 80


class Gap(NamedTuple):
    """Description of a gap, and the query of the host's activity during it."""

    text: str
    command: str


def gap_of_each_step(losses: Losses, database: KinetoDatabase, lost_s: float) -> Gap | None:
    """Return the typical longest gap of a judged step, if one gap in each is most of a loss."""
    rows = [row for row in database.query("longest_gaps") if row["step"] in losses.judged.steps]
    total_s = sum(_seconds(row) for row in rows) / len(losses.judged.rows)
    if not losses.marked or total_s < LEAST_OF_LOSS * lost_s:
        return None
    typical = median(_seconds(row) for row in rows)
    return _gap(database, min(rows, key=lambda row: abs(_seconds(row) - typical)))


def gap_of_event(event: SingleEvent, database: KinetoDatabase) -> Gap | None:
    """Return the gap that makes a step longer than the others, if there is one."""
    rows = [
        row
        for row in database.query("longest_gaps")
        if row["step"] == event.step and event.rank in (None, row["rank"])
    ]
    longest = max(rows, key=_seconds, default=None)
    if longest is None or _seconds(longest) < LEAST_OF_LOSS * event.longer_s:
        return None
    return _gap(database, longest)


def _seconds(row: Row) -> float:
    return float(row["end_ns"] - row["start_ns"]) / 1e9


def _gap(database: KinetoDatabase, row: Row) -> Gap:
    span = {"rank": row["rank"], "start": row["start_ns"], "end": row["end_ns"]}
    ran = database.query("host_in_gap", **span)
    if ran:
        text = f"while the host runs {_short(ran[0]['name'])}"
    elif row["kernel"]:
        text = f"before {_short(row['kernel'])}, while the host runs nothing that was recorded"
    else:
        text = "while the host runs nothing that was recorded"
    return Gap(
        f"{seconds(_seconds(row))} {text}",
        'disttrain analyze --sql "SELECT name, category, thread, duration_ns / 1e6 AS ms FROM'
        f" events WHERE rank = {row['rank']} AND start_ns < {row['end_ns']} AND start_ns +"
        f' duration_ns > {row["start_ns"]} ORDER BY ms DESC LIMIT 20"',
    )


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
