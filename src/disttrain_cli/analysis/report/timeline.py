"""Timelines of single steps: lanes and bars, few enough for a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from disttrain_cli.analysis.result.verdicts import LANE, Place
from disttrain_cli.spec.trace import COMPUTE

if TYPE_CHECKING:
    from disttrain_cli.analysis.job.database import Database
    from disttrain_cli.analysis.kineto.database import KinetoDatabase

#: Most lanes and bars per step; the page states how many more are left out.
MOST_LANES = 128
MOST_BARS = 16_000


def kind_of(operation: str) -> str:
    """Return the kind of an operation, which is its colour."""
    if operation.startswith("receive"):
        return "receive"
    if operation.startswith("send") or operation == "wait":
        return "send"
    known = (*COMPUTE, "load", "reduce", "step")
    return operation if operation in known else "other"


def representative_steps(database: Database) -> list[tuple[int, str]]:
    """Return up to three measured steps: the one of median length, the slowest and the fastest."""
    rows = database.sql("SELECT step FROM windows WHERE measured ORDER BY window_s, step")
    return chosen_of([int(row["step"]) for row in rows])


def chosen_of(steps: list[int]) -> list[tuple[int, str]]:
    """Return the median step, the slowest and the fastest, each once.

    Args:
        steps: sorted from the shortest to the longest.
    """
    if not steps:
        return []
    chosen = {steps[0]: "fastest", steps[-1]: "slowest", steps[len(steps) // 2]: "typical"}
    return sorted(chosen.items(), key=lambda item: ("typical", "slowest", "fastest").index(item[1]))


def drawable(database: Database, step: int, why: str, rank: int | None = None) -> dict[str, Any]:
    """Return one step of disttrain's traces for drawing; `rank` must be among the lanes."""
    length_us = database.sql(
        "SELECT window_s * 1e6 AS us FROM windows WHERE step = $step", {"step": step}
    )[0]["us"]
    return drawn_ranks(
        step,
        why,
        database.query("lanes", step=step),
        lambda ranks: [
            row
            | {"kind": kind_of(row["operation"]), "operation": row["operation"].replace("_", " ")}
            for row in database.query("timeline", step=step, ranks=ranks)
        ],
        length_us,
        rank,
    )


def drawn_ranks(
    step: int,
    why: str,
    lanes: list[dict[str, Any]],
    bars_of: Callable[[list[int]], list[dict[str, Any]]],
    length_us: float,
    rank: int | None = None,
) -> dict[str, Any]:
    """Return one step with a lane per rank.

    Args:
        step: number of the step.
        why: reason for its choice, such as "slowest".
        lanes: rows of ranks.
        bars_of: returns the bars of ranks, as for `drawn_lanes` but with their rank.
        length_us: length of the step.
        rank: must be among the lanes.
    """
    shown = choose_lanes(lanes, rank)
    row_of = {lane["rank"]: index for index, lane in enumerate(shown)}
    drawn = drawn_lanes(
        [(lane["unit"], Place(**{part: lane.get(part) for part in LANE}).lane) for lane in shown],
        [(row_of[bar["rank"]], bar) for bar in bars_of(list(row_of))],
        length_us,
    )
    left_out = len(lanes) - len(shown)
    notes = (
        [
            f"{left_out} of {len(lanes)} ranks are not drawn; of every stage, replicas from the"
            " slowest to the fastest are."
        ]
        if left_out
        else []
    )
    if drawn["bars_left_out"]:
        notes.append(f"The {drawn['bars_left_out']} shortest operations are not drawn.")
    return drawn | {"title": f"Step {step}", "why": why, "note": " ".join(notes)}


def kineto_steps(database: KinetoDatabase) -> list[tuple[int | None, str]]:
    """Return the measured step of median length and the slowest; None without marked steps.

    None is the whole recording.
    """
    rows = database.sql(
        "SELECT step FROM step_lengths WHERE measured GROUP BY step ORDER BY max(length_s), step"
    )
    steps = [int(row["step"]) for row in rows]
    chosen = (
        {steps[-1]: "slowest", steps[len(steps) // 2]: "typical"}
        if steps
        else {None: "everything recorded"}
    )
    return sorted(chosen.items(), key=lambda item: item[1], reverse=True)


def drawable_kineto(
    database: KinetoDatabase, step: int | None, why: str, rank: int | None = None
) -> dict[str, Any]:
    """Return one profiler step, three lanes per rank: host, compute, communication and copies."""
    lanes = database.query("lanes", step=step)
    shown = choose_lanes(lanes, rank)
    ranks = list({lane["rank"] for lane in shown})
    rows, hosts = (
        database.query(name, step=step, ranks=ranks, most=MOST_BARS // 2)
        for name in ("timeline", "timeline_host")
    )
    busy = {row["rank"] for row in hosts}
    named = [
        (one["rank"], kind, one["unit"])
        for one in shown
        for kind in ([0] if one["stage"] == 0 and one["rank"] in busy else []) + [1 + one["stage"]]
    ]
    index = {(number, kind): at for at, (number, kind, _) in enumerate(named)}
    bars = [
        (index[row["rank"], row["lane"]], row)
        for row in hosts + rows
        if (row["rank"], row["lane"]) in index
    ]
    first_ns = min((row["start_ns"] for _, row in bars), default=0)
    bars = [(lane, row | {"start_us": (row["start_ns"] - first_ns) / 1e3}) for lane, row in bars]
    length_us = max((row["start_us"] + row["duration_us"] for _, row in bars), default=1.0)
    drawn = drawn_lanes(
        [(unit, ("host", "compute", "communication, copies")[kind]) for _, kind, unit in named],
        bars,
        length_us,
    )
    left_out = sum(lane["kernels"] for lane in lanes) - len(rows)
    note = (
        f"The {left_out} shortest of the kernels, or those of further ranks, are not drawn."
        if left_out
        else ""
    )
    return drawn | {"title": "All" if step is None else f"Step {step}", "why": why, "note": note}


def drawn_lanes(
    lanes: list[tuple[str, str]], bars: list[tuple[int, dict[str, Any]]], length_us: float
) -> dict[str, Any]:
    """Return lanes and bars in the form that the script reads: columns of numbers.

    Names are indices in a list.

    Args:
        lanes: (group, name).
        bars: (lane, {operation, kind, module, slot, start_us, duration_us}).
        length_us: length of the step.
    """
    left_out = max(0, len(bars) - MOST_BARS)
    if left_out:
        bars = sorted(bars, key=lambda bar: -bar[1]["duration_us"])[:MOST_BARS]
        bars.sort(key=lambda bar: (bar[0], bar[1]["start_us"]))
    digits = 1 if length_us < 1e6 else 0
    names = list(dict.fromkeys((bar["operation"], bar["kind"]) for _, bar in bars))
    modules = list(dict.fromkeys(bar["module"] for _, bar in bars))
    number = {name: index for index, name in enumerate(names)}
    module = {name: at for at, name in enumerate(modules)}
    return {
        "length_us": length_us,
        "lanes": lanes,
        "names": names,
        "modules": modules,
        "bars_left_out": left_out,
        "bars": {
            "lane": [lane for lane, _ in bars],
            "name": [number[bar["operation"], bar["kind"]] for _, bar in bars],
            "module": [module[bar["module"]] for _, bar in bars],
            "slot": [bar["slot"] for _, bar in bars],
            "start": _rounded((bar["start_us"] for _, bar in bars), digits),
            "length": _rounded((bar["duration_us"] for _, bar in bars), 1),
        },
    }


def choose_lanes(lanes: list[dict[str, Any]], rank: int | None = None) -> list[dict[str, Any]]:
    """Return as many lanes as can be drawn, in their order.

    These are all, or some of every stage, from the slowest to the fastest.

    Args:
        lanes: rows with `unit`, `stage`, `rank` and `compute_ns`.
        rank: must be among them.
    """
    if len(lanes) <= MOST_LANES:
        return lanes
    stages: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for lane in lanes:
        stages.setdefault((lane["unit"], lane["stage"]), []).append(lane)
    each = max(1, MOST_LANES // len(stages))
    chosen = {rank}
    for members in stages.values():
        members = sorted(members, key=lambda lane: (-lane["compute_ns"], lane["rank"]))
        count = min(each, len(members))
        chosen |= {
            members[round(index * (len(members) - 1) / max(1, count - 1))]["rank"]
            for index in range(count)
        }
    return [lane for lane in lanes if lane["rank"] in chosen][: MOST_LANES + 1]


def _rounded(values: Iterable[float], digits: int) -> list[float]:
    """Round numbers for short JSON: integers without a decimal point."""
    return [
        int(value) if value == int(value) else value
        for value in (round(value, digits) for value in values)
    ]
