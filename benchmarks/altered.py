"""Real traces with faults put into them: an operation-level one of Megatron, and Kineto traces of a
DLRM.

Both are read from the folder that DISTTRAIN_TRACES names (`straggler-ST/trace-ST.parquet`,
`dlrm-8rank/`). Where it is missing their cases are left out.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.known import Row, Truth
from disttrain_cli.analysis.study.graph import StudyGraph, graph_of
from disttrain_cli.analysis.study.operations import BACKWARD, FORWARD, TRANSFERS
from disttrain_cli.analysis.study.reader import read_study
from disttrain_cli.analysis.walk import Floats

TRACES = Path(os.environ.get("DISTTRAIN_TRACES", "../shared/data/traces"))
OPERATIONS = ("clean", "rank", "stage", "link", "rank and stage", "small", "few steps", "missing")
OPERATIONS_HELD_OUT = ("host",)
KINETO = ("clean", "rank", "transfers", "small", "missing")
KINETO_HELD_OUT = ("two ranks",)
NUMBERED = ("correlation", "External id")  # what joins a kernel to its launch
PAUSE_S = 1.0  # between steps
#: Operations that begin later than this after they could have waited for the slow stage, which is
#: taken out.
LONGEST_LAUNCH_S = 0.005


@cache
def _study() -> StudyGraph | None:
    path = TRACES / "straggler-ST" / "trace-ST.parquet"
    return graph_of(read_study([path])) if path.is_file() else None


def operations(kind: str, seed: int, path: Path) -> list[Truth] | None:
    """Write the Megatron trace without its slow stage, and with the faults of a kind; None where
    there is none."""
    graph = _study()
    if graph is None:
        return None
    random_ = random.Random(f"operations {kind} {seed}")
    steps = sorted(
        random_.sample(
            range(graph.taken.shape[1]),
            random_.randint(1, 3) if kind == "few steps" else random_.randint(6, 20),
        )
    )
    then = (
        random_.choice(("clean", "rank", "stage", "link"))
        if kind in ("few steps", "missing")
        else kind
    )
    if then == "small":
        then = random_.choice(("rank", "stage"))
    largest = 0.08 if kind == "small" else 0.8
    base = _even(graph)
    # cause, place, seconds more that are taken, and until launched
    faults: list[tuple[str, Row, Floats, Floats]] = []

    def put(cause: str, pick: Any, place: Row, factor: float) -> None:
        passes = np.isin(graph.optype, (FORWARD, BACKWARD)) & pick
        faults.append(
            (cause, place, np.where(passes[:, None], base * (factor - 1), 0.0), np.zeros_like(base))
        )

    if then in ("rank", "rank and stage"):
        rank = random_.choice(np.unique(graph.rank).tolist())
        put("worker", graph.rank == rank, {"rank": rank}, 1 + random_.uniform(0.01, largest))
    if then in ("stage", "rank and stage"):
        stage = random_.choice(np.unique(graph.stage).tolist())
        put("stage", graph.stage == stage, {"stage": stage}, 1 + random_.uniform(0.01, largest))
    if then == "link":
        stage, late_s = random_.choice(np.unique(graph.stage).tolist()), random_.uniform(0.0, 0.15)
        own = np.isin(graph.optype, TRANSFERS) & (graph.stage == stage)
        late = np.where(own[:, None], late_s * np.random.default_rng(seed).random(base.shape), 0.0)
        faults.append(("communication", {}, late, np.zeros_like(base)))
    if then == "host":
        rank, late_s = random_.choice(np.unique(graph.rank).tolist()), random_.uniform(0.0, 0.12)
        own = (graph.rank == rank) & (graph.optype == FORWARD)
        faults.append(
            (
                "host",
                {"rank": rank},
                np.zeros_like(base),
                np.where(own[:, None], late_s, 0.0) + 0 * base,
            )
        )

    def with_(some: list[tuple[str, Row, Floats, Floats]]) -> tuple[Floats, Floats]:
        taken = base + sum((more for _, _, more, _ in some), np.zeros_like(base))
        launch = np.where(graph.launch > LONGEST_LAUNCH_S, 0.0, graph.launch)
        return taken[:, steps], (launch + sum((late for *_, late in some), np.zeros_like(base)))[
            :, steps
        ]

    def step_s(some: list[tuple[str, Row, Floats, Floats]]) -> float:
        return float(graph.replay(*with_(some)).mean())

    lost = {random_.choice(np.unique(graph.rank).tolist())} if kind == "missing" else set()
    _write_study(graph, *with_(faults), lost, path)
    with_all, none = step_s(faults), step_s([])
    return [
        Truth(
            cause,
            place,
            1 - step_s([one for one in faults if one[0] != cause]) / with_all,
            1 - none / with_all,
        )
        for cause, place, *_ in faults
    ]


def _even(graph: StudyGraph) -> Floats:
    """Seconds of the operations, with the passes of every stage as long as those of the others
    are."""
    taken = graph.taken.copy()
    for kind in (FORWARD, BACKWARD):
        own = graph.optype == kind
        usual = np.median(
            [taken[own & (graph.stage == stage)].mean() for stage in np.unique(graph.stage)]
        )
        for stage in np.unique(graph.stage):
            pick = own & (graph.stage == stage)
            taken[pick] *= usual / taken[pick].mean()
    return taken


def _write_study(
    graph: StudyGraph, taken: Floats, launch: Floats, lost: set[int], path: Path
) -> None:
    """Rows of the replayed steps; a transfer ends when its group has moved it, as in the study's
    recordings."""
    time = np.concatenate([launch, taken])
    ends = np.empty_like(time)
    ends[graph.walk.node] = graph.walk.ends(time[graph.walk.node])
    start, end = ends[: len(taken)], ends[len(taken) :]
    step_s = end.max(axis=0) + PAUSE_S
    origin = np.concatenate([[0.0], np.cumsum(step_s)[:-1]])
    chunk = np.tile(graph.trace.chunk, len(graph.trace.replicas))
    kept = ~np.isin(graph.rank, sorted(lost))
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "dp_rank",
            "stage",
            "rank",
            "step",
            "optype",
            "start_ts",
            "duration",
            "seq_id",
            "mc",
            "mb_id",
            "gmc",
        )
    }
    for step in range(taken.shape[1]):
        for name, values in (
            ("dp_rank", graph.replica),
            ("stage", graph.stage),
            ("rank", graph.rank),
            ("step", np.full(len(taken), step)),
            ("optype", graph.optype),
            ("start_ts", origin[step] + start[:, step]),
            ("duration", (end - start)[:, step]),
            ("seq_id", graph.seq),
            ("mc", chunk),
            ("mb_id", graph.slot),
            ("gmc", chunk),
        ):
            columns[name] += values[kept].tolist()
    path.mkdir(parents=True)
    pq.write_table(pa.table(columns), path / "trace.parquet")


@cache
def _kineto() -> list[dict[str, Any]] | None:
    files = sorted((TRACES / "dlrm-8rank").glob("worker?_*.json.gz"))
    return [json.loads(gzip.decompress(file.read_bytes())) for file in files] or None


def kineto(kind: str, seed: int, path: Path) -> list[Truth] | None:
    """Write the DLRM's traces with ranks that reach collectives together, but for the faults of a
    kind.

    Between two collectives everything of a rank is stretched so that all reach the next one within
    some µs. A slow rank takes longer for it; a slow transfer makes a collective longer for all.
    Steps are the one that was recorded, again.
    """
    ranks = _kineto()
    if ranks is None:
        return None
    random_ = random.Random(f"kineto {kind} {seed}")
    draw = np.random.default_rng(seed)
    steps, then = (
        random_.randint(2, 5),
        random_.choice(("clean", "rank")) if kind == "missing" else kind,
    )
    many, count = len(ranks), 8
    recorded = [_collectives(one["traceEvents"]) for one in ranks]
    local = np.array(
        [
            [
                start - (own[place - 1][1] if place else own[0][0] - 2000)
                for place, (start, _) in enumerate(own)
            ]
            for own in recorded
        ],
        dtype=float,
    )  # [ranks, count] µs
    moved = np.array(
        [min(own[place][1] - own[place][0] for own in recorded) for place in range(count)],
        dtype=float,
    )
    usual = np.median(local, axis=0)
    more = np.zeros((steps, many, count))
    slow: list[int] = []
    if then in ("rank", "small", "two ranks"):
        slow = random_.sample(range(many), 2 if then == "two ranks" else 1)
        for rank in slow:
            more[:, rank] += usual * random_.uniform(0.01, 0.08 if then == "small" else 1.0)
    if then == "transfers":
        moved = moved * random_.uniform(1.0, 30.0)
    takes = (
        usual * (1 + random_.choice((0.005, 0.02)) * np.abs(draw.standard_normal(more.shape)))
        + more
    )
    lost = random_.sample(list(range(many)), 2) if kind == "missing" else []
    path.mkdir(parents=True)
    step_us = np.zeros(steps)
    for rank, trace in enumerate(ranks):
        ends, clock, begins = np.zeros((steps, count)), 0.0, np.zeros((steps, count))
        starts = np.zeros(steps)
        for step in range(steps):
            starts[step] = clock
            for place in range(count):
                begins[step, place] = clock + takes[step, rank, place]
                clock += takes[step, :, place].max() + moved[place]
                ends[step, place] = clock
            clock += 500.0
            step_us[step] = clock - starts[step]
        if rank not in lost:
            _write_kineto(
                trace, recorded[rank], starts, begins, ends, step_us, path / f"rank{rank}.json"
            )
    whole = step_us[1:].mean()
    share = {
        rank: float(
            (takes[1:].max(axis=1) - np.delete(takes[1:], rank, axis=1).max(axis=1))
            .sum(axis=1)
            .mean()
            / whole
        )
        for rank in slow
    }
    together = (
        float(
            (takes[1:].max(axis=1) - np.delete(takes[1:], slow, axis=1).max(axis=1))
            .sum(axis=1)
            .mean()
            / whole
        )
        if slow
        else 0.0
    )
    named = [Truth("worker", {"rank": rank}, own, together) for rank, own in share.items()]
    if together >= 0.05:
        return named
    moving = float(moved.sum() / whole)
    return [
        Truth("communication", {}, moving if moving >= 0.1 else 0.0),
        Truth("host", {}, 0.9 - moving),
    ]


def _collectives(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Start and end of a rank's collectives in µs."""
    return sorted(
        (one["ts"], one["ts"] + one["dur"])
        for one in events
        if one.get("cat") == "kernel" and "nccl" in one["name"].lower()
    )


def _write_kineto(
    trace: dict[str, Any],
    was: list[tuple[float, float]],
    starts: Floats,
    begins: Floats,
    ends: Floats,
    step_us: Floats,
    path: Path,
) -> None:
    """A rank's events with its collectives at other times, and everything else moved with what it
    lies between."""
    first, base = was[0][0] - 2000, 1.7e15
    before = [first, *(time for pair in was for time in pair), was[-1][1] + 500]
    events = [one for one in trace["traceEvents"] if one.get("ph") == "M"]
    for step, start in enumerate(starts):
        after = [
            start,
            *(time for pair in zip(begins[step], ends[step], strict=True) for time in pair),
            start + step_us[step],
        ]
        for one in trace["traceEvents"]:
            if (
                one.get("ph") != "X"
                or "ProfilerStep" in one["name"]
                or not first <= one["ts"] <= before[-1]
            ):
                continue
            at, until = np.interp([one["ts"], one["ts"] + one["dur"]], before, after)
            args = {
                name: value + 10**6 * step if name in NUMBERED else value
                for name, value in one.get("args", {}).items()
            }
            events.append(one | {"ts": base + float(at), "dur": float(until - at), "args": args})
        events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{step}",
                "pid": 1,
                "tid": 1,
                "ts": base + float(start),
                "dur": float(step_us[step]),
            }
        )
    path.write_text(json.dumps(trace | {"traceEvents": events}))
