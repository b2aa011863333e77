"""What the page draws as timelines: lanes and bars of single steps, few enough for a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from disttrain_cli.analysis.result.verdicts import LANE, Place
from disttrain_cli.spec.trace import COMPUTE

if TYPE_CHECKING:
    from disttrain_cli.analysis.job.database import Database
    from disttrain_cli.analysis.kineto.database import KinetoDatabase

#: Lanes and bars drawn per step; more are left out, and the page says so.
MOST_LANES = 128
MOST_BARS = 16_000


def kind_of(operation: str) -> str:
    """The colour of an operation."""
    if operation.startswith("receive"):
        return "receive"
    if operation.startswith("send") or operation == "wait":
        return "send"
    known = (*COMPUTE, "load", "reduce", "step")
    return operation if operation in known else "other"


def representative_steps(database: Database) -> list[tuple[int, str]]:
    """Up to three measured steps: the one of median length, the slowest and the fastest."""
    rows = database.sql("SELECT step FROM windows WHERE measured ORDER BY window_s, step")
    return chosen_of([int(row["step"]) for row in rows])


def chosen_of(steps: list[int]) -> list[tuple[int, str]]:
    """Of steps from the shortest to the longest: the middle one, the slowest and the fastest, each
    once."""
    if not steps:
        return []
    chosen = {steps[0]: "fastest", steps[-1]: "slowest", steps[len(steps) // 2]: "typical"}
    return sorted(chosen.items(), key=lambda item: ("typical", "slowest", "fastest").index(item[1]))


def drawable(database: Database, step: int, why: str, rank: int | None = None) -> dict[str, Any]:
    """One step of own traces for drawing; `rank` is one that must be among the lanes."""
    length_us = database.sql(
        "SELECT window_s * 1e6 AS us FROM windows WHERE step = $step", {"step": step}
    )[0]["us"]
    return drawn_ranks(
        step,
        why,
        database.query("lanes", step=step),
        lambda ranks: [
            row
            | {
                "kind": kind_of(row["operation"]),
                "operation": row["operation"].replace("_", " "),
            }
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
    """One step with a lane per rank; `bars_of` ranks, as `drawn_lanes` needs them with their
    rank."""
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
            f"{left_out} of {len(lanes)} ranks are not drawn: of every stage replicas from the"
            " slowest to the fastest are."
        ]
        if left_out
        else []
    )
    if drawn["bars_left_out"]:
        notes.append(f"The {drawn['bars_left_out']} shortest operations are not drawn.")
    return drawn | {"title": f"Step {step}", "why": why, "note": " ".join(notes)}


def kineto_steps(database: KinetoDatabase) -> list[tuple[int | None, str]]:
    """The measured profiler step of median length and the slowest; without marked steps all that
    was recorded."""
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
    """One profiler step, three lanes per rank: its host, compute, and communication and copies."""
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
    """Lanes (group, name) and bars (lane, {operation, kind, module, slot, start_us, duration_us})
    as the script reads them: columns of numbers, names by their place in a list.
    """
    left_out = max(0, len(bars) - MOST_BARS)
    if left_out:
        bars = sorted(bars, key=lambda bar: -bar[1]["duration_us"])[:MOST_BARS]
        bars.sort(key=lambda bar: (bar[0], bar[1]["start_us"]))
    digits = 1 if length_us < 1e6 else 0
    names = list(dict.fromkeys((bar["operation"], bar["kind"]) for _, bar in bars))
    modules = list(dict.fromkeys(bar["module"] for _, bar in bars))
    number, module = (
        {name: index for index, name in enumerate(names)},
        {name: at for at, name in enumerate(modules)},
    )
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
    """Of lanes with `unit`, `stage`, `rank`, `compute_ns` as many as can be drawn: all, or of every
    stage some from the slowest to the fastest; in their order.
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
    """Short in JSON: whole numbers without a point."""
    return [
        int(value) if value == int(value) else value
        for value in (round(value, digits) for value in values)
    ]
