"""Suspects in an operation-level trace: those of all formats, transfers and launch delays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.causes import Finding, State, Suspect, find_causes
from disttrain_cli.analysis.graph import Passes
from disttrain_cli.analysis.losses import Explained, ratio
from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.analysis.study.graph import StudyGraph
from disttrain_cli.analysis.study.losses import UNIT, passes_of
from disttrain_cli.analysis.study.operations import BACKWARD, FORWARD
from disttrain_cli.analysis.study.replays import ideal_of
from disttrain_cli.analysis.suspects import Scale, by_rank, most_s, of_passes
from disttrain_cli.analysis.walk import Floats


def study_causes(graph: StudyGraph, why: Explained, where: Mapping[int, Place]) -> list[Finding]:
    """Return the causes that slow the steps: operations' durations, and recorded launch delays.

    An operation's launch depends on the durations of others: with those fixed it would be launched
    earlier. So fixes of durations are tried on steps without launch delays, as in the study.
    """
    slow, _ = find_causes(
        lambda state: graph.replay(*state), (graph.taken,), _suspects(graph, why, where)
    )
    delayed, _ = find_causes(
        lambda state: graph.replay(graph.taken, *state),
        (graph.launch,),
        by_rank(
            "host",
            graph.rank,
            where,
            graph.launch.clip(0.0),
            lambda mask: lambda state: (np.where(mask[:, None], 0.0, state[0]),),
        ),
    )
    late = bool(delayed) and (not slow or delayed[0].gain_s.mean() > slow[0].gain_s.mean())
    return [*delayed[:1], *slow] if late else [*slow, *delayed[:1]]


def _suspects(graph: StudyGraph, why: Explained, where: Mapping[int, Place]) -> list[Suspect]:
    """Return possible faults in the operations' durations; `why` explains the passes."""
    nodes = np.flatnonzero(np.isin(graph.optype, (FORWARD, BACKWARD)))

    def scaled(state: State, factor: Floats, more: Floats) -> State:
        taken = state[0].copy()
        taken[nodes] = taken[nodes] * factor + more
        return (taken,)

    passes = passes_of(graph)
    return [
        *of_passes(passes, why, scaled, where),
        *_stages(passes, why, scaled),
        *_transfers(graph, nodes),
        *_hosts(graph, nodes, why, where),
    ]


def _stages(passes: Passes, why: Explained, scaled: Scale) -> Iterator[Suspect]:
    """Yield stages whose passes take longer than the median of the others'.

    The trace does not show if they have more work.
    """
    stages = np.unique(passes.stage)
    if len(stages) < 2:
        return
    for stage in stages.tolist():
        factor = np.ones_like(why.staged)
        for operation in np.unique(passes.operation):
            masks = {
                int(one): float(
                    why.staged[(passes.stage == one) & (passes.operation == operation)].mean()
                )
                for one in stages
            }
            others = float(np.median([ms for one, ms in masks.items() if one != stage]))
            factor[(passes.stage == stage) & (passes.operation == operation)] = min(
                1.0, others / masks[stage]
            )
        yield Suspect(
            "stage",
            Place(unit=UNIT, stage=stage),
            partial(scaled, factor=factor, more=np.zeros_like(factor)),
            most_s(passes, why.staged * (1 - factor)),
        )


def _transfers(graph: StudyGraph, passes: NDArray[np.int64]) -> Iterator[Suspect]:
    """Yield, by stage, operations slower than the median of their type, passes excluded."""
    late = (graph.taken - ideal_of(graph)).clip(0.0)
    late[passes] = 0.0
    for stage in np.unique(graph.stage):
        late_s = np.where((graph.stage == stage)[:, None], late, 0.0)
        yield Suspect(
            "communication",
            Place(unit=UNIT, stage=int(stage)),
            partial(_sooner, late=late_s),
            float(late_s.sum(axis=0).mean()),
        )


def _sooner(state: State, late: Floats) -> State:
    return (state[0] - late,)


def _hosts(
    graph: StudyGraph, passes: NDArray[np.int64], why: Explained, where: Mapping[int, Place]
) -> list[Suspect]:
    """Return ranks with passes that take longer than is usual for the rank."""
    steady, added = np.ones_like(graph.taken), np.zeros_like(graph.taken)
    steady[passes] = ratio(why.ranked, graph.taken[passes])
    added[passes] = (graph.taken[passes] - why.ranked).clip(0.0)
    return by_rank(
        "host",
        graph.rank,
        where,
        added,
        lambda mask: lambda state: (state[0] * np.where(mask[:, None], steady, 1.0),),
    )
