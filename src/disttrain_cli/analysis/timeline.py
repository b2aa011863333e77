"""Timelines of single steps: compact for the report, and as Chrome/Perfetto JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from disttrain_cli.analysis.database import Database
from disttrain_cli.spec.files import write_whole

#: Lanes and bars drawn per step; more are left out, and the page says so.
MOST_LANES = 256
MOST_BARS = 12_000


def representative_steps(database: Database) -> list[tuple[int, str]]:
    """Up to three measured steps: the one of median length, the fastest and the slowest."""
    rows = database.sql("SELECT step FROM windows WHERE measured ORDER BY window_s, step")
    steps = [int(row["step"]) for row in rows]
    if not steps:
        return []
    chosen = [(steps[len(steps) // 2], "typical"), (steps[-1], "slowest"), (steps[0], "fastest")]
    return [
        (step, why) for index, (step, why) in enumerate(chosen) if step not in [s for s, _ in chosen[:index]]
    ]


def drawable(database: Database, step: int, why: str) -> dict[str, Any]:
    """One step for drawing: lanes, names, and bars [lane, operation, module, slot, start µs, length µs]."""
    lanes = database.sql(
        "SELECT rank, any_value(t.unit) AS unit, any_value(stage) AS stage, any_value(replica) AS replica FROM trace t "
        "JOIN units u USING (unit) WHERE step = $step GROUP BY rank ORDER BY any_value(u.place), stage, replica, rank",
        {"step": step},
    )
    shown = lanes[:MOST_LANES]
    place = {lane["rank"]: index for index, lane in enumerate(shown)}
    rows = [row for row in database.query("timeline", step=step) if row["rank"] in place]
    if len(rows) > MOST_BARS:
        rows = sorted(rows, key=lambda row: -row["duration_us"])[:MOST_BARS]
    operations, modules = _names(rows, "operation"), _names(rows, "module")
    bars = [
        [
            place[row["rank"]],
            operations.index(row["operation"]),
            modules.index(row["module"]),
            row["slot"],
            round(row["start_us"], 1),
            round(row["duration_us"], 1),
        ]
        for row in rows
    ]
    length_us = database.sql("SELECT window_s * 1e6 AS us FROM windows WHERE step = $step", {"step": step})[0][
        "us"
    ]
    return {
        "step": step,
        "why": why,
        "length_us": length_us,
        "operations": operations,
        "modules": modules,
        "lanes": [[lane["rank"], lane["unit"], lane["stage"], lane["replica"]] for lane in shown],
        "lanes_left_out": len(lanes) - len(shown),
        "bars": bars,
    }


def write_chrome_trace(database: Database, steps: list[int], out: Path) -> Path:
    """Write steps as Chrome/Perfetto JSON: one process per unit, one thread per rank, times in µs."""
    places = {row["unit"]: row["place"] for row in database.sql("SELECT unit, place FROM units")}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": place, "args": {"name": unit}}
        for unit, place in places.items()
    ]
    origin = database.sql("SELECT min(start_ns) AS ns FROM windows")[0]["ns"]
    for row in database.sql(
        "SELECT * FROM operations WHERE list_contains($steps, step) ORDER BY start_ns", {"steps": steps}
    ):
        events.append(
            {
                "ph": "X",
                "name": f"{row['operation']} {row['slot']}" if row["slot"] >= 0 else row["operation"],
                "cat": row["operation"],
                "pid": places.get(row["unit"], len(places)),
                "tid": row["rank"],
                "ts": (row["start_ns"] - origin) / 1e3,
                "dur": row["duration_ns"] / 1e3,
                "args": {key: row[key] for key in ("step", "module", "tokens", "images", "bytes", "peer")},
            }
        )
    return write_whole(out, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _names(rows: list[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))
