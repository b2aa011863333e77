"""Dependency graph of one step of a Megatron job with 1F1B, as in the study.

On a rank, passes follow each other as recorded; a receive precedes the pass that it feeds and
follows the pass before that, a send follows the pass that it sends from; each kind of transfer has
a separate queue. Parameters are gathered before the first forward; after the last backward follow
the gradients of layer norms and embeddings, those of the rest, clipping, and the optimizer. A
transfer is done by a group, and begins when its last member has:

    end of a transfer = latest start in its group + transfer time
    end of the rest   = start + duration

Interleaved stages hold several parts of the model each (part c of stage s is the model's c × stages
+ s), so what the last stage sends goes to the next part on the first one. Each part's parameters
are gathered before its first forward; if gradient reduction overlaps with backward passes, each
part's reduction follows its last backward. Recorders then write a transfer for every pass, also for
those at the model's ends, which move nothing; and transfers that belong to no pass, after the last
or before the first of a step; they may lack the very first receive. The order of passes is the
recorded one. (The three published traces have stages of one part; for the others this follows the
study's program.)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.study.clocks import on_one_clock
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

#: An operation this many seconds before it can have happened contradicts the clocks, and counts as
#: no time.
CLOCKS_APART_S = 1e-2


class NoGraphError(Exception):
    """The trace cannot be replayed; the message is the reason, as the end of a sentence."""


@dataclass(frozen=True)
class StudyGraph:
    """Operations of all replicas [operations], in the trace's columns, and their dependencies."""

    trace: StudyTrace  # on one clock
    optype: NDArray[np.str_]
    stage: Ints
    replica: Ints
    rank: Ints
    seq: Ints
    slot: Ints  # microbatch of a pass
    depth: Ints  # part of the model of a pass: its stage, if stages have one part
    walk: Walk  # two nodes per operation: its begin, and its end
    launch: Floats  # [operations, steps] seconds from when it could begin to when it did
    # [operations, steps] duration; for a transfer, from the latest start in its group
    taken: Floats
    contradictions: int  # ends before the latest start of the group

    def replay(self, taken: Floats, launch: Floats | None = None) -> Floats:
        """Return the seconds of every step [steps] for these durations and launch delays.

        `launch` None means no launch delays.
        """
        time = np.concatenate([np.zeros_like(taken) if launch is None else launch, taken])
        return np.asarray(self.walk.ends(time[self.walk.node]).max(axis=0), dtype=np.float64)


def graph_of(trace: StudyTrace) -> StudyGraph:
    """Return the graph of a trace, on one clock if those of its ranks contradict each other.

    Raises:
        NoGraphError: its transfers do not match its passes, or its order is impossible.
    """
    after, groups = _one_replica(trace)
    trace = on_one_clock(trace, groups)
    count, replicas = len(trace.optype), len(trace.replicas)
    total = count * replicas
    waits = [
        np.array(sorted(node_before), dtype=np.int64) + replica * count
        for replica in range(replicas)
        for node_before in after
    ]
    together = [np.array([node], dtype=np.int64) for node in range(total)]
    for group in groups:
        members = [np.array(group, dtype=np.int64) + replica * count for replica in range(replicas)]
        every = np.concatenate(members)
        for node in every:
            together[node] = (
                every if trace.optype[group[0]] in OVER_REPLICAS else members[node // count]
            )
    walk = walk_of(
        np.full(2 * total, -1, dtype=np.int64),
        [*(node_before + total for node_before in waits), *together],
    )
    if walk is None:
        raise NoGraphError(
            "the recorded order of its operations is contradictory (clocks not synchronised?)"
        )
    launch = np.stack(
        [
            trace.start[node] - (trace.end[node_before].max(axis=0) if len(node_before) else 0.0)
            for node, node_before in enumerate(waits)
        ]
    )
    taken = np.stack(
        [
            trace.end[node] - trace.start[node_before].max(axis=0)
            for node, node_before in enumerate(together)
        ]
    )
    contradictions = int((taken <= -CLOCKS_APART_S).sum())
    return StudyGraph(
        trace=trace,
        optype=np.tile(trace.optype, replicas),
        stage=np.tile(trace.stage, replicas),
        replica=np.repeat(trace.replicas, count),
        rank=trace.rank.reshape(-1),
        seq=np.tile(trace.seq, replicas),
        slot=np.tile(trace.slot, replicas),
        depth=np.tile(_depth(trace), replicas),
        walk=walk,
        launch=np.where(launch <= -CLOCKS_APART_S, 0.0, launch),
        taken=np.where(taken <= -CLOCKS_APART_S, 0.0, taken),
        contradictions=contradictions,
    )


def _one_replica(trace: StudyTrace) -> tuple[list[set[int]], list[list[int]]]:
    """Return, by operation, those of its rank that it waits for, and the groups of transfers."""
    after: list[set[int]] = [set() for _ in trace.optype]
    stages = int(trace.stage.max()) + 1
    nodes = [
        {kind: _of(trace, stage, kind) for kind in np.unique(trace.optype).tolist()}
        for stage in range(stages)
    ]
    crossing = []
    for stage, kinds in enumerate(nodes):
        crossing.append(_passes(trace, stage, kinds, after))
        _update(trace, kinds, after)
    groups = [
        [op]
        for kinds in nodes
        for kind in (GATHER, SCATTER, SEPARATE)
        for op in kinds.get(kind, [])
    ]
    groups.append([op for kinds in nodes for op in kinds.get(CLIP, [])])
    groups.append(
        [op for kinds in (nodes[0], nodes[-1])[:stages] for op in kinds.get(EMBEDDING, [])]
    )
    for stage in range(stages):  # the last stage is followed by the first, with its next part
        following = (stage + 1) % stages
        groups += _pairs(
            trace, crossing[stage]["forward-send"], crossing[following]["forward-recv"]
        )
        groups += _pairs(
            trace, crossing[following]["backward-send"], crossing[stage]["backward-recv"]
        )
    return after, [group for group in groups if group]


def _of(trace: StudyTrace, stage: int, kind: str) -> list[int]:
    """Return the operations of a type on a stage, in order."""
    nodes = np.flatnonzero((trace.stage == stage) & (trace.optype == kind))
    return [int(op) for op in nodes[np.argsort(trace.seq[nodes])]]


def _depth(trace: StudyTrace) -> Ints:
    """Return the part of the model that every operation works on, if it works on one."""
    return trace.chunk.clip(0) * (trace.stage.max() + 1) + trace.stage


def _pairs(
    trace: StudyTrace, sends: list[tuple[int, int]], receives: list[tuple[int, int]]
) -> list[list[int]]:
    """Return the two sides of every transfer, in order.

    Args:
        trace: operations of the job.
        sends: sends, each with the part of the model that it leads to.
        receives: receives, likewise.
    """
    if [part for _, part in sends] != [part for _, part in receives]:
        kinds = [str(trace.optype[side[0][0]]) for side in (sends, receives) if side]
        raise NoGraphError(
            f"its {' and '.join(kinds)} do not match: {len(sends)} against {len(receives)}, or in "
            "another order"
        )
    return [[send, receive] for (send, _), (receive, _) in zip(sends, receives, strict=True)]


def _passes(
    trace: StudyTrace, stage: int, kinds: dict[str, list[int]], after: list[set[int]]
) -> dict[str, list[tuple[int, int]]]:
    """Add what the passes and transfers of a stage wait for to `after`.

    Returns:
        By kind of transfer, those that have another side, with the part of the model that each
        leads to.
    """
    depth = _depth(trace)
    parts = trace.chunks * (int(trace.stage.max()) + 1)
    crossing = dict[str, list[tuple[int, int]]]()
    passes = sorted(
        [*kinds.get(FORWARD, []), *kinds.get(BACKWARD, [])],
        key=lambda op: (trace.start[op, 0], trace.seq[op], trace.optype[op]),
    )
    _chain(passes, after)
    for direction, mask in (
        ("forward", kinds.get(FORWARD, [])),
        ("backward", kinds.get(BACKWARD, [])),
    ):
        if not mask:
            raise NoGraphError(f"stage {stage} has no {direction} passes")
        ahead = 1 if direction == "forward" else -1
        for kind, toward in ((f"{direction}-recv", -ahead), (f"{direction}-send", ahead)):
            crosses = [0 <= depth[one] + toward < parts for one in mask]
            transfers = kinds.get(kind, [])
            _chain(transfers, after)
            crossing[kind] = []
            for transfer, number in _of_passes(trace, stage, kind, transfers, mask, crosses):
                if kind.endswith("send"):
                    after[transfer].add(mask[number])
                else:
                    after[mask[number]].add(transfer)
                    after[transfer] |= {mask[number - 1]} if number else set()
                if crosses[number]:
                    crossing[kind].append(
                        (transfer, int(depth[mask[number]]) + ahead * kind.endswith("send"))
                    )
    first = passes.index(kinds[BACKWARD][0])
    if first >= 2:
        for kind in ("backward-recv", "backward-send"):
            for transfer in kinds.get(kind, [])[:1]:
                after[transfer].add(passes[first - 2])
    return crossing


def _of_passes(
    trace: StudyTrace,
    stage: int,
    kind: str,
    transfers: list[int],
    passes: list[int],
    crosses: list[bool],
) -> list[tuple[int, int]]:
    """Return transfers of one kind, each with the index of the pass that it feeds or sends from."""
    if not any(crosses):
        return []
    every = list(range(len(passes)))
    needed = [number for number, does in enumerate(crosses) if does]
    if len(transfers) > len(passes) and kind.endswith("recv"):
        transfers = [one for one in transfers if trace.start[one, 0] <= trace.start[passes[-1], 0]]
    elif len(transfers) > len(passes):
        transfers = [one for one in transfers if trace.end[one, 0] >= trace.end[passes[0], 0]]
    lacking = every[1:] if kind.endswith("recv") and not crosses[0] else needed
    for numbers in (every, needed, lacking):
        if len(transfers) == len(numbers):
            return list(zip(transfers, numbers, strict=True))
    raise NoGraphError(
        f"stage {stage} has {len(needed)} {kind.split('-')[0]} passes that need a {kind}, but "
        f"{len(transfers)} of these"
    )


def _update(trace: StudyTrace, kinds: dict[str, list[int]], after: list[set[int]]) -> None:
    """Add what gathering, reduction and optimizer of a stage wait for to `after`."""
    gathers, scatters = kinds.get(GATHER, []), kinds.get(SCATTER, [])
    _chain(
        sorted(
            [*gathers, *scatters],
            key=lambda op: (trace.start[op, 0], trace.seq[op], trace.optype[op]),
        ),
        after,
    )
    for part, gather in {trace.chunk[op]: op for op in gathers}.items():
        after[_of_part(trace, kinds[FORWARD], part)[0]].add(gather)
    last = kinds[BACKWARD][-1]
    overlapped = bool(kinds.get(SEPARATE))
    for part, scatter in {trace.chunk[op]: op for op in reversed(scatters) if overlapped}.items():
        after[scatter].add(_of_part(trace, kinds[BACKWARD], part)[-1])
    closing = [
        op for kind in CLOSING if not (overlapped and kind == SCATTER) for op in kinds.get(kind, [])
    ]
    _chain([last, *closing], after)
    if overlapped and scatters:
        following = [op for op in closing if trace.optype[op] != "gc"]
        after[following[0]].add(scatters[-1])


def _of_part(trace: StudyTrace, passes: list[int], part: int) -> list[int]:
    """Return the passes of a part of their stage; all, if the part is not recorded."""
    return [one for one in passes if trace.chunk[one] == part] or passes


def _chain(operations: list[int], after: list[set[int]]) -> None:
    """Make each operation wait for the one before."""
    for before, following in itertools.pairwise(operations):
        after[following].add(before)
