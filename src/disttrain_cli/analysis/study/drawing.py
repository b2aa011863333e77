"""Pictures of an operation-level trace: operations of some steps, stage × replica, time by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from disttrain_cli.analysis.report.pictures import Pictures
from disttrain_cli.analysis.report.timeline import chosen_of, drawn_ranks
from disttrain_cli.analysis.study.graph import NoGraphError, graph_of
from disttrain_cli.analysis.study.losses import UNIT
from disttrain_cli.analysis.study.operations import BACKWARD, FORWARD, TRANSFERS
from disttrain_cli.analysis.study.reader import StudyTrace, read_study
from disttrain_cli.analysis.walk import Floats


def study_pictures(files: list[Path], rank: int | None = None) -> Pictures:
    """Return the pictures of operation-level Parquet files; `rank` is the one the verdict names.

    A send is drawn while it moves, not while it waits for its receiver: ranks compute during their
    sends.

    Raises:
        DataError: as `reader.read_study`.
    """
    trace = read_study(files)
    try:
        graph = graph_of(trace)
        trace, taken = graph.trace, graph.taken
    except NoGraphError:
        taken = trace.end - trace.start
    moves = np.tile([kind.endswith("-send") for kind in trace.optype], len(trace.replicas))
    start = np.where(moves[:, None], np.maximum(trace.start, trace.end - taken), trace.start)
    length = trace.end.max(axis=0) - trace.start.min(axis=0)
    order = np.argsort(length, kind="stable").tolist()
    cells = _cells(trace)
    return Pictures(
        [_drawn(trace, start, int(step), why, rank) for step, why in chosen_of(order)],
        cells,
        [
            {"step": int(step), "iteration_s": float(seconds)}
            for step, seconds in zip(trace.steps, length, strict=True)
        ],
    )


def _drawn(
    trace: StudyTrace, start: Floats, step: int, why: str, rank: int | None
) -> dict[str, Any]:
    """Draw a step, by its index among those of the trace."""
    passes = np.isin(trace.optype, (FORWARD, BACKWARD))
    began, length = (
        values[:, step].reshape(trace.rank.shape) for values in (start, trace.end - start)
    )
    lanes, numbers = list[dict[str, Any]](), dict[int, tuple[int, Any]]()
    for stage in np.unique(trace.stage):
        nodes = np.flatnonzero(trace.stage == stage)
        for block, replica in enumerate(trace.replicas):
            number = int(trace.rank[block, nodes[0]])
            numbers[number] = (
                block,
                nodes[np.lexsort((began[block, nodes], passes[nodes]))],
            )  # passes are drawn over operations that wait
            lanes.append(
                {
                    "unit": UNIT,
                    "stage": int(stage),
                    "replica": int(replica),
                    "rank": number,
                    "compute_ns": int(1e9 * length[block, nodes[passes[nodes]]].sum()),
                }
            )

    def bars_of(ranks: list[int]) -> list[dict[str, Any]]:
        return [
            {
                "rank": number,
                "operation": str(trace.optype[op]),
                "kind": _kind(str(trace.optype[op])),
                "module": f"part {trace.chunk[op]}"
                if trace.chunks > 1 and trace.chunk[op] >= 0
                else None,
                "slot": int(trace.slot[op]),
                "start_us": 1e6 * float(began[block, op]),
                "duration_us": 1e6 * float(length[block, op]),
            }
            for number in ranks
            for block, nodes in [numbers[number]]
            for op in nodes
            if length[block, op] > 0
        ]

    return drawn_ranks(
        int(trace.steps[step]), why, lanes, bars_of, 1e6 * float(trace.end[:, step].max()), rank
    )


def _kind(optype: str) -> str:
    """Return the kind of an operation, which is its colour."""
    if optype in (FORWARD, BACKWARD):
        return optype.removesuffix("-compute")
    if optype in TRANSFERS:
        return "receive" if optype.endswith("recv") else "send"
    return "step" if optype == "optimizer" else "reduce"


def _cells(trace: StudyTrace) -> list[dict[str, Any]]:
    """Return forward and backward of a microbatch on every stage of every replica.

    The times are means over microbatches and steps.
    """
    passes = np.isin(trace.optype, (FORWARD, BACKWARD))
    took = (
        (trace.end - trace.start).reshape(len(trace.replicas), len(trace.optype), -1).mean(axis=2)
    )
    stages = np.unique(trace.stage)
    masks = [passes & (trace.stage == stage) for stage in stages]
    ms = 1e3 * np.stack(
        [took[:, pick].sum(axis=1) / len(np.unique(trace.slot[pick])) for pick in masks]
    )
    return [
        {
            "unit": UNIT,
            "stage": int(stage),
            "replica": int(replica),
            "depth": int(stage),
            "mean_ms": float(mean),
            "ratio": float(mean / ms.mean()),
            "normalised": None,
        }
        for stage, row in zip(stages, ms, strict=True)
        for replica, mean in zip(trace.replicas, row, strict=True)
    ]
