"""Communicators of all ranks, in the order in which they create them.

NCCL has no tags: on one communicator the messages of two ranks pair by their order, and a rank's
operations run one after the other. Neighbouring stages therefore have two separate communicators,
one in each direction, so that rows that wait for their receiver block neither rows in the other
direction nor any collective. All ranks of both stages share them, whatever their DP and TP: a rank
is in few (`costs.nccl` prices them).

Gloo pairs by tag, whatever the order, and every gloo group is a full mesh of sockets: there
messages use the world's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import distributed_c10d

from disttrain_cli.costs.nccl import CONTEXT_CTAS, MESSAGE_CTAS, WORLD_CTAS
from disttrain_cli.spec.stage_graph import Stage, StageGraph

#: Process group of messages, by (number of the sending stage, number of the receiving stage).
Ways = dict[tuple[int, int], dist.ProcessGroup]
#: Bounds of NCCL's channels, hence of its multiprocessors and memory, by kind of communicator.
CTAS = {
    "world": WORLD_CTAS,
    "messages": MESSAGE_CTAS,
    "context parallel": CONTEXT_CTAS,
    "expert parallel": CONTEXT_CTAS,
}


@dataclass(frozen=True)
class Communicator:
    """Ranks that share one communicator."""

    kind: Literal[
        "data parallel",
        "tensor parallel",
        "context parallel",
        "expert parallel",
        "expert replicas",
        "tied weights",
        "messages",
    ]
    name: str
    ranks: tuple[int, ...]
    # for messages: numbers of the sending and the receiving stage, of all cuts between these ranks
    ways: tuple[tuple[int, int], ...] = ()


def in_order() -> bool:
    """Return True if messages pair by their order alone, and a send may block (NCCL, not gloo)."""
    return dist.get_backend() != "gloo"


def nccl_options(kind: str, backend: str) -> Any | None:
    """Return NCCL's options for a communicator of this kind; None for its own, or without NCCL.

    What computation waits for, messages and exchanges of CP and EP groups, gets a stream of high
    priority.
    """
    if kind not in CTAS or backend != "nccl" or not hasattr(dist, "ProcessGroupNCCL"):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=kind != "world")
    options.config.min_ctas = options.config.max_ctas = CTAS[kind]
    options._timeout = distributed_c10d.default_pg_nccl_timeout  # torch warns of any other
    return options


def peers(graph: StageGraph, way: tuple[int, int], rank: int) -> list[int]:
    """Return the ranks with which a rank exchanges rows over a cut, as `routes` may find them.

    Inside a unit that is the rank of the same coordinates. Items of different units are assigned
    to replicas anew in each step: any rank of the other stage.
    """
    here, there = (graph.stages[number] for number in way)
    if rank in there.ranks:
        here, there = there, here
    if here.unit is there.unit:
        return [there.ranks[here.ranks.index(rank)]]
    return list(there.ranks)


def communicators(graph: StageGraph, messages: bool) -> Iterator[Communicator]:
    """Yield all communicators except the world's; those of neighbouring stages with `messages`.

    A rank joins its communicators one after the other, so cuts at even positions of a line come
    before those at odd ones: stages along a line wait for one neighbour, not for a chain of them.
    """
    for stage in graph.first_stages:
        for tp_rank in range(stage.tp):
            yield Communicator(
                "data parallel",
                f"replicas of {name_of(stage)}, TP rank {tp_rank}",
                tuple(stage.dp_group(tp_rank)),
            )
        for number, group in enumerate(stage.tp_groups() if stage.tp > 1 else ()):
            replica, cp_rank = divmod(number, stage.cp)
            where = f"replica {replica}" + (f", CP rank {cp_rank}" if stage.cp > 1 else "")
            yield Communicator(
                "tensor parallel", f"TP group of {name_of(stage)}, {where}", tuple(group)
            )
        for number, group in enumerate(stage.cp_groups() if stage.cp > 1 else ()):
            replica, tp_rank = divmod(number, stage.tp)
            yield Communicator(
                "context parallel",
                f"CP group of {name_of(stage)}, replica {replica}, TP rank {tp_rank}",
                tuple(group),
            )
        for number, group in enumerate(stage.ep_groups() if stage.ep > 1 else ()):
            yield Communicator(
                "expert parallel", f"EP group {number} of {name_of(stage)}", tuple(group)
            )
        for ep_rank in range(stage.ep if stage.ep > 1 else 0):
            yield Communicator(
                "expert replicas",
                f"expert replicas of {name_of(stage)}, EP rank {ep_rank}",
                tuple(stage.expert_group(ep_rank)),
            )
    for stage in graph.stages:
        if stage.twin is not None and stage.number < stage.twin:
            other = graph.stages[stage.twin]
            for one, two in zip(stage.ranks, other.ranks, strict=True):
                yield Communicator(
                    "tied weights",
                    f"tied weights of {name_of(stage)} and {name_of(other)}, ranks {one} and {two}",
                    (one, two),
                )
    ways: dict[tuple[tuple[int, ...], ...], list[tuple[Stage, Stage]]] = {}
    for sender in sorted(graph.stages, key=lambda stage: stage.depth % 2) if messages else ():
        for taker in (graph.stages[number] for number in sender.after):
            for here, there in ((sender, taker), (taker, sender)):
                ways.setdefault((here.ranks, there.ranks), []).append((here, there))
    for ranks, ends in ways.items():
        yield Communicator(
            "messages",
            " to ".join(map(name_of, ends[0])),
            tuple(sorted(itertools.chain(*ranks))),
            tuple((here.number, there.number) for here, there in ends),
        )


def name_of(stage: Stage) -> str:
    """Return the name of a stage."""
    return f"{stage.unit.name} stage {stage.index}"
