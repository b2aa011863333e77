"""Which operation waits for which, in one step of a Megatron job with 1F1B (the study's dependency model).

On a rank, passes follow each other as recorded; a receive comes before the pass it feeds and after the one before
that, a send after the pass it sends from; each kind of transfer has a queue of its own. Parameters are gathered before
the first forward; after the last backward follow the gradients of layer norms and embeddings, those of the rest,
clipping, and the optimizer. A transfer is done by a group, and begins when its last member has:

    end of a transfer = latest start in its group + transfer time; end of the rest = start + duration
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.study.operations import (
    BACKWARD,
    CLIP,
    CLOSING,
    EMBEDDING,
    FORWARD,
    GATHER,
    OVER_REPLICAS,
    SCATTER,
    SEPARATE,
)
from disttrain_cli.analysis.study.reader import StudyTrace
from disttrain_cli.analysis.walk import Floats, Ints, Walk, walk_of

#: What lies this many seconds before it can have happened is a contradiction of clocks, and counts as no time.
CLOCKS_APART_S = 1e-2


class NoGraphError(Exception):
    """The trace cannot be replayed; the message says why, as the end of a sentence."""


@dataclass(frozen=True)
class StudyGraph:
    """Operations of all replicas [operations], and how they wait for each other, in the columns of the trace."""

    trace: StudyTrace
    optype: NDArray[np.str_]
    stage: Ints
    replica: Ints
    rank: Ints
    seq: Ints
    walk: Walk  # every operation twice: as it begins, and as it ends
    launch: Floats  # [operations, steps] seconds from when it could begin to when it did
    taken: Floats  # [operations, steps] seconds it took: of a transfer, from the latest start in its group
    contradictions: int  # ends before the latest start of the group

    def replay(self, taken: Floats, launch: Floats | None = None) -> Floats:
        """Seconds of every step [steps] if operations take so long and nothing, or `launch`, holds them up."""
        time = np.concatenate([np.zeros_like(taken) if launch is None else launch, taken])
        return np.asarray(self.walk.ends(time[self.walk.place]).max(axis=0), dtype=np.float64)


def graph_of(trace: StudyTrace) -> StudyGraph:
    """The graph of a trace.

    Raises:
        NoGraphError: its stages are interleaved, its transfers do not match its passes, or its order is impossible.
    """
    if trace.chunks > 1:
        raise NoGraphError(f"its stages are interleaved ({trace.chunks} parts each), which is not replayed")
    after, groups = _one_replica(trace)
    count, replicas = len(trace.optype), len(trace.replicas)
    total = count * replicas
    waits = [np.array(sorted(own), dtype=np.int64) + replica * count for replica in range(replicas) for own in after]
    together = [np.array([node], dtype=np.int64) for node in range(total)]
    for group in groups:
        members = [np.array(group, dtype=np.int64) + replica * count for replica in range(replicas)]
        every = np.concatenate(members)
        for node in every:
            together[node] = every if trace.optype[group[0]] in OVER_REPLICAS else members[node // count]
    walk = walk_of(np.full(2 * total, -1, dtype=np.int64), [*(own + total for own in waits), *together])
    if walk is None:
        raise NoGraphError("the recorded order of its operations contradicts itself (clocks apart?)")
    launch = np.stack([trace.start[node] - (trace.end[own].max(axis=0) if len(own) else 0.0)
                       for node, own in enumerate(waits)])
    taken = np.stack([trace.end[node] - trace.start[own].max(axis=0) for node, own in enumerate(together)])
    contradictions = int((taken <= -CLOCKS_APART_S).sum())
    return StudyGraph(
        trace=trace, optype=np.tile(trace.optype, replicas), stage=np.tile(trace.stage, replicas),
        replica=np.repeat(trace.replicas, count), rank=trace.rank.reshape(-1), seq=np.tile(trace.seq, replicas),
        walk=walk, launch=np.where(launch <= -CLOCKS_APART_S, 0.0, launch),
        taken=np.where(taken <= -CLOCKS_APART_S, 0.0, taken), contradictions=contradictions)


def _one_replica(trace: StudyTrace) -> tuple[list[set[int]], list[list[int]]]:
    """By operation, those of its rank that it waits for; and the groups that do a transfer together."""
    after: list[set[int]] = [set() for _ in trace.optype]
    stages = int(trace.stage.max()) + 1
    own = [{kind: _of(trace, stage, kind) for kind in np.unique(trace.optype).tolist()} for stage in range(stages)]
    for stage, kinds in enumerate(own):
        _passes(trace, stage, stages, kinds, after)
        _update(trace, kinds, after)
    groups = [[op] for kinds in own for kind in (GATHER, SCATTER, SEPARATE) for op in kinds.get(kind, [])]
    groups.append([op for kinds in own for op in kinds.get(CLIP, [])])
    groups.append([op for kinds in (own[0], own[-1])[:stages] for op in kinds.get(EMBEDDING, [])])
    for near, far in itertools.pairwise(own):
        groups += _pairs(near, "forward-send", far, "forward-recv")
        groups += _pairs(far, "backward-send", near, "backward-recv")
    return after, [group for group in groups if group]


def _of(trace: StudyTrace, stage: int, kind: str) -> list[int]:
    """Operations of a type on a stage, in order."""
    found = np.flatnonzero((trace.stage == stage) & (trace.optype == kind))
    return [int(op) for op in found[np.argsort(trace.seq[found])]]


def _pairs(sender: dict[str, list[int]], send: str, receiver: dict[str, list[int]], receive: str) -> list[list[int]]:
    return [list(pair) for pair in zip(sender.get(send, []), receiver.get(receive, []), strict=True)]


def _passes(trace: StudyTrace, stage: int, stages: int, kinds: dict[str, list[int]], after: list[set[int]]) -> None:
    """What the passes and transfers of a stage wait for."""
    passes = sorted([*kinds.get(FORWARD, []), *kinds.get(BACKWARD, [])],
                    key=lambda op: (trace.start[op, 0], trace.seq[op], trace.optype[op]))
    _chain(passes, after)
    for direction, own in (("forward", kinds.get(FORWARD, [])), ("backward", kinds.get(BACKWARD, []))):
        if not own:
            raise NoGraphError(f"stage {stage} has no {direction} passes")
        into, out_of = (stage > 0, stage < stages - 1)[:: 1 if direction == "forward" else -1]
        for kind, needed in ((f"{direction}-recv", into), (f"{direction}-send", out_of)):
            transfers = kinds.get(kind, [])
            if needed and len(transfers) != len(own):
                raise NoGraphError(f"stage {stage} has {len(own)} {direction} passes but {len(transfers)} {kind}")
            _chain(transfers, after)
            for number, (transfer, one) in enumerate(zip(transfers, own, strict=False) if needed else ()):
                if kind.endswith("send"):
                    after[transfer].add(one)
                else:
                    after[one].add(transfer)
                    after[transfer] |= {own[number - 1]} if number else set()
    first = passes.index(kinds[BACKWARD][0])
    if first >= 2:
        for kind in ("backward-recv", "backward-send"):
            for transfer in kinds.get(kind, [])[:1]:
                after[transfer].add(passes[first - 2])


def _update(trace: StudyTrace, kinds: dict[str, list[int]], after: list[set[int]]) -> None:
    """What gathering, reduction and optimizer of a stage wait for."""
    gathers, scatters = kinds.get(GATHER, []), kinds.get(SCATTER, [])
    _chain(sorted([*gathers, *scatters], key=lambda op: (trace.start[op, 0], trace.seq[op], trace.optype[op])), after)
    if gathers:
        after[kinds[FORWARD][0]].add(gathers[-1])
    last = kinds[BACKWARD][-1]
    overlapped = bool(kinds.get(SEPARATE))
    if overlapped and scatters:
        after[scatters[0]].add(last)
    closing = [op for kind in CLOSING if not (overlapped and kind == SCATTER) for op in kinds.get(kind, [])]
    _chain([last, *closing], after)
    if overlapped and scatters:
        following = [op for op in closing if trace.optype[op] != "gc"]
        after[following[0]].add(scatters[-1])


def _chain(operations: list[int], after: list[set[int]]) -> None:
    """Each of them waits for the one before."""
    for before, following in itertools.pairwise(operations):
        after[following].add(before)
