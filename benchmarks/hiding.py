"""Everything that hides waiting, rehearsed: backwards in two parts, overlapped reductions and
gathers, TP messages overlapped with GEMMs, and the ordering `best`.

    python -m benchmarks.hiding accuracy   simulated beside rehearsed steps of six such plans
    python -m benchmarks.hiding gain       a layout with all of it over the same without, in turns

A layout "without" is the plan's own with whole backwards, reductions at the end, plain messages and
the ordering `paper`; it has the same devices, stages and memory. As in `benchmarks.rehearsal`,
whose rehearsals these are: the first step of each is left out, and with --out FILE rows are kept.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import Tables
from benchmarks.rehearsal import (
    GAIN_TIME_SCALE,
    OURS,
    SMALL,
    SMALL_STEPS,
    Case,
    Keep,
    Prepared,
    Row,
    command,
    opened,
    rehearsed,
)
from disttrain_cli.spec.plan import Layout, read_plan, write_plan

CASES = (
    Case("mllm-9b", 24, 48),
    Case("mllm-9b", 96, 192),
    Case("mllm-9b", 192, 288),
    Case("mllm-15b", 96, 144),
    Case("mllm-72b", 96, 64),
    Case("mllm-72b", 192, 144),
)
STEPS, PAIRS = 3, 5
GAIN_CASES = tuple(Case(preset, 192, 288) for preset in ("mllm-9b", "mllm-15b", "mllm-72b"))
WITHOUT = "without"


def plain(layout: Layout) -> Layout:
    """The layout with nothing of its waiting hidden."""
    units = [
        unit.model_copy(update={"weight_delay": None, "tp_overlap": False}) for unit in layout.units
    ]
    return layout.model_copy(update={"overlap": False, "units": units})


def hidden(layout: Layout) -> str:
    """What a plan hides, in a few words."""
    return ", ".join(
        [
            f"{unit.name}: weights after {unit.weight_delay}"
            for unit in layout.units
            if unit.weight_delay is not None
        ]
        + [f"{unit.name}: TP messages" for unit in layout.units if unit.tp_overlap]
        + ["reductions"] * layout.overlap
    )


def both(run: Prepared) -> dict[str, Path]:
    """The case's plan as it is and without what hides waiting."""
    ours = run.plan(OURS)
    other = run.folder / f"{WITHOUT}.yaml"
    if not other.is_file():
        plan = read_plan(ours)
        write_plan(other, plan.model_copy(update={"plan": plain(plan.plan)}))
    return {OURS: ours, WITHOUT: other}


def accuracy(small: bool, keep: Keep) -> Tables:
    rows: list[Row] = []
    for case in (SMALL,) if small else CASES:
        with opened(case) as run:
            key = {"part": "accuracy", **asdict(case)}
            rows.append(keep(key, partial(_with_all, run, SMALL_STEPS if small else STEPS)))
    off = [abs(_off_pct(row)) for row in rows]
    return {
        "Iteration time with everything hidden, simulated beside rehearsed": [
            {
                "model": row["preset"],
                "layout": row["layout"],
                "hidden": row["hidden"],
                "batch": row["batch"],
                "devices": row["devices"],
                "processes": row["processes"],
                "rehearsed s": row["rehearsed_s"],
                "simulated s": row["simulated_s"],
                "off %": _off_pct(row),
            }
            for row in rows
        ],
        "How far the simulator is off": [
            {"rehearsals": len(off), "median %": median(off), "worst %": max(off)}
        ],
    }


def gain(small: bool, keep: Keep) -> Tables:
    results = []
    for case in (SMALL,) if small else GAIN_CASES:
        rows: dict[str, list[Row]] = {OURS: [], WITHOUT: []}
        with opened(case) as run:
            for pair in range(1 if small else PAIRS):
                for name, own in rows.items():
                    key = {"part": "gain", **asdict(case), "plan": name, "pair": pair}
                    own.append(keep(key, partial(_in_turn, run, name, pair)))
        results.append(_gain(rows[OURS], rows[WITHOUT]))
    return {"Throughput with everything hidden over the same layout without": results}


def _with_all(run: Prepared, steps: int) -> Row:
    run.plan(OURS)
    row = rehearsed(run, OURS, steps, ordering="best")
    return row | {"hidden": hidden(read_plan(run.plan(OURS)).plan)}


def _in_turn(run: Prepared, name: str, pair: int) -> Row:
    both(run)
    return rehearsed(
        run,
        name,
        SMALL_STEPS,
        seed=pair,
        ordering="best" if name == OURS else "paper",
        time_scale=GAIN_TIME_SCALE,
    )


def _gain(ours: list[Row], theirs: list[Row]) -> dict[str, Any]:
    seen, told = (
        [other[what] / own[what] for own, other in zip(ours, theirs, strict=True)]
        for what in ("rehearsed_s", "simulated_s")
    )
    off = [100 * (one / other - 1) for one, other in zip(seen, told, strict=True)]
    return {
        "model": ours[0]["preset"],
        "layout": ours[0]["layout"],
        "devices": ours[0]["devices"],
        "pairs": len(ours),
        "gain rehearsed": median(seen),
        "each": " ".join(f"{value:.3f}" for value in seen),
        "gain simulated": median(told),
        "off %, worst": max(off, key=abs),
    }


def _off_pct(row: Row) -> float:
    return 100 * (row["simulated_s"] / row["rehearsed_s"] - 1)


if __name__ == "__main__":
    command(__doc__, {"accuracy": accuracy, "gain": gain})
