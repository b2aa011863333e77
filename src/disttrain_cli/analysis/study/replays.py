"""Replays of the steps in the study's definition.

Without launch delays (time that its operations do not explain, such as loading data) a step takes
T. Its ideal takes the **mean** of each type of pass and of the optimizer, and the **median** of
each type of communication, over all ranks and steps.

    S = T ÷ T(ideal)
    S_x = T(ideal, group x as recorded) ÷ T(ideal)
    S of a worker = the smaller one of its replica's and its stage's

M_W and M_S are the shares of T − T(ideal) that are regained when the worst 3 % of the workers, or
the last stage, take the ideal's times. T is a mean over the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.result.verdicts import WhatIf
from disttrain_cli.analysis.study.graph import StudyGraph
from disttrain_cli.analysis.study.operations import COMMUNICATION, family
from disttrain_cli.analysis.walk import Floats

WORST_SHARE = 0.03


@dataclass(frozen=True)
class Replays:
    """Seconds of every step: as recorded, without launch delays, and ideal."""

    measured: Floats
    undelayed: Floats
    ideal: Floats
    what_if: WhatIf


def ideal_of(graph: StudyGraph) -> Floats:
    """Return the seconds of every operation in the ideal, [operations, steps]."""
    ideal = np.empty_like(graph.taken)
    for kind in np.unique(graph.optype):
        mask = graph.optype == kind
        ideal[mask] = (np.median if kind in COMMUNICATION else np.mean)(graph.taken[mask])
    return ideal


def replay(graph: StudyGraph) -> Replays:
    """Run every replay of the study."""
    ideal = ideal_of(graph)
    undelayed, best = graph.replay(graph.taken), graph.replay(ideal)
    loss = float(undelayed.mean() - best.mean())

    def slowdown(pick: NDArray[np.bool_]) -> float:
        return float(graph.replay(np.where(pick[:, None], graph.taken, ideal)).mean() / best.mean())

    def regained(pick: NDArray[np.bool_]) -> float | None:
        fixed = graph.replay(np.where(pick[:, None], ideal, graph.taken)).mean()
        return float(undelayed.mean() - fixed) / loss if loss > 1e-9 else None

    families = np.array([family(kind) for kind in graph.optype])
    by_stage = {int(stage): slowdown(graph.stage == stage) for stage in np.unique(graph.stage)}
    by_replica = {
        int(replica): slowdown(graph.replica == replica) for replica in np.unique(graph.replica)
    }
    score = {
        (int(rank), int(stage), int(replica)): min(by_replica[int(replica)], by_stage[int(stage)])
        for rank, stage, replica in set(zip(graph.rank, graph.stage, graph.replica, strict=True))
    }
    worst = sorted(score, key=lambda worker: (-score[worker], worker))[
        : math.ceil(WORST_SHARE * len(score))
    ]
    return Replays(
        measured=(graph.trace.end.max(axis=0) - graph.trace.start.min(axis=0)),
        undelayed=undelayed,
        ideal=best,
        what_if=WhatIf(
            slowdown=float(undelayed.mean() / best.mean()),
            by_stage={str(stage): value for stage, value in by_stage.items()},
            by_replica={str(replica): value for replica, value in by_replica.items()},
            by_operation={str(kind): slowdown(families == kind) for kind in np.unique(families)},
            worst_workers_share=regained(np.isin(graph.rank, [rank for rank, _, _ in worst])),
            last_stage_share=regained(graph.stage == graph.stage.max()),
        ),
    )
