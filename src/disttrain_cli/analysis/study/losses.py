"""Lost seconds of an operation-level trace by cause, as `analysis.losses` has them for disttrain's.

The ideal is the study's, slow ranks left out: one unit whose stages are equal. No row has the work
of a microbatch, so it is estimated from what its passes have in common: the median, over stages and
directions, of their time over the mean of their rank (and part of the model). The remaining
differences are the stage, the rank, communication (and the optimizer), and the host: launch delays,
loading data included.
"""

from __future__ import annotations

import numpy as np

from disttrain_cli.analysis.graph import Passes, group_mean
from disttrain_cli.analysis.losses import Explained, Losses, explain, factors, per_rank, successive
from disttrain_cli.analysis.study.graph import StudyGraph
from disttrain_cli.analysis.study.operations import BACKWARD, FORWARD
from disttrain_cli.analysis.study.replays import Replays, ideal_of
from disttrain_cli.analysis.walk import Floats

#: Name in sentences of the one unit of a job whose trace names none.
UNIT = "the job"
#: Causes that its trace lacks: there is one unit, and waiting for data counts as the host's.
NOT_TOLD = ("unit", "data")


def explain_study(graph: StudyGraph) -> Explained:
    """Attribute the passes' times to their work, stage and rank."""
    passes = passes_of(graph)
    compute = graph.taken[np.isin(graph.optype, (FORWARD, BACKWARD))]
    return explain(passes, compute, _work(passes, compute))


def split_study(graph: StudyGraph, replays: Replays, why: Explained) -> Losses:
    """Replay the steps with the delays returning one by one.

    Args:
        graph: operations of the job.
        replays: the study's replays of the graph.
        why: `explain_study` of the graph.
    """
    nodes = np.flatnonzero(np.isin(graph.optype, (FORWARD, BACKWARD)))
    passes = passes_of(graph)
    compute, ideal = graph.taken[nodes], ideal_of(graph)
    parts = [
        why.mean,
        why.mean,
        why.uneven,
        why.worked,
        why.staged,
        why.ranked,
    ]  # with one unit, its share of the devices is right
    times = [graph.replay(_with(ideal, nodes, part)) for part in parts]
    times.append(graph.replay(_with(graph.taken, nodes, why.ranked)))
    times += [times[-1], graph.replay(graph.taken, graph.launch), replays.measured]
    ranks = np.unique(graph.rank)
    late = (graph.taken - ideal).clip(0.0)
    late[nodes] = 0.0
    return Losses(
        ideal=times[0],
        measured=replays.measured,
        lost=successive(times),
        busy=per_rank(passes, why.staged),
        data_wait={},
        links={
            (UNIT, int(stage)): float(late[graph.stage == stage].sum(axis=0).mean())
            for stage in np.unique(graph.stage)
        },
        gap={
            int(rank): float(graph.launch[graph.rank == rank].clip(0.0).sum(axis=0).mean())
            for rank in ranks
        },
        crowded=0.0,
        steps=graph.trace.steps,
        **factors(passes, compute, why),
    )


def passes_of(graph: StudyGraph) -> Passes:
    """Return the forward and backward passes among the operations."""
    mask = np.isin(graph.optype, (FORWARD, BACKWARD))
    return Passes(
        rank=graph.rank[mask],
        slot=graph.slot[mask],
        operation=(graph.optype[mask] == BACKWARD).astype(np.int64),
        unit=[UNIT] * int(mask.sum()),
        stage=graph.stage[mask],
        replica=graph.replica[mask],
        depth=graph.depth[mask],
    )


def _with(taken: Floats, mask: np.ndarray, compute: Floats) -> Floats:
    """Return the operations' times with those of the passes replaced."""
    changed = taken.copy()
    changed[mask] = compute
    return changed


def _work(passes: Passes, compute: Floats) -> Floats:
    """Estimate the work of every pass over the mean, [passes, steps].

    It is what the passes of a microbatch have in common.
    """
    ratio = compute / np.maximum(
        group_mean(compute, passes.groups("rank", "depth", "operation")), 1e-12
    )
    work = np.empty_like(ratio)
    microbatches = passes.groups("replica", "slot")
    for microbatch in np.unique(microbatches):
        mask = microbatches == microbatch
        work[mask] = np.median(ratio[mask], axis=0)
    return work
