"""Communicators of all ranks, in the order in which they create them.

NCCL has no tags: on one communicator the messages of two ranks pair by their order, and a rank's
operations run one after the other. Neighbouring stages therefore have two separate communicators,
one in each direction, so that rows that wait for their receiver block neither rows in the other
direction nor any collective. All ranks of both stages share them, whatever their DP and TP: a rank
is in few (`costs.memory.communicators` counts them).

Gloo pairs by tag, whatever the order, and every gloo group is a full mesh of sockets: there
messages use the world's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from disttrain_cli.spec.stage_graph import Stage, StageGraph

#: Process group of messages, by (number of the sending stage, number of the receiving stage).
Ways = dict[tuple[int, int], dist.ProcessGroup]


@dataclass(frozen=True)
class Communicator:
    """Ranks that share one communicator."""

    kind: Literal[
        "data parallel", "tensor parallel", "context parallel", "tied weights", "messages"
    ]
    name: str
    ranks: tuple[int, ...]
    # for messages: numbers of the sending and the receiving stage
    way: tuple[int, int] | None = None


def in_order() -> bool:
    """Return True if messages pair by their order alone, and a send may block (NCCL, not gloo)."""
    return dist.get_backend() != "gloo"


def communicators(graph: StageGraph, messages: bool) -> Iterator[Communicator]:
    """Yield all communicators except the world's; those of neighbouring stages with `messages`.

    A rank joins its communicators one after the other, so cuts at even positions of a line come
    before those at odd ones: stages along a line wait for one neighbour, not for a chain of them.
    """
    for stage in graph.stages:
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
    for stage in graph.stages:
        if stage.twin is not None and stage.number < stage.twin:
            other = graph.stages[stage.twin]
            for one, two in zip(stage.ranks, other.ranks, strict=True):
                yield Communicator(
                    "tied weights",
                    f"tied weights of {name_of(stage)} and {name_of(other)}, ranks {one} and {two}",
                    (one, two),
                )
    if messages:
        for sender in sorted(graph.stages, key=lambda stage: stage.depth % 2):
            for taker in (graph.stages[number] for number in sender.after):
                for here, there in ((sender, taker), (taker, sender)):
                    yield Communicator(
                        "messages",
                        f"{name_of(here)} to {name_of(there)}",
                        tuple(sorted((*here.ranks, *there.ranks))),
                        (here.number, there.number),
                    )


def name_of(stage: Stage) -> str:
    """Return the name of a stage."""
    return f"{stage.unit.name} stage {stage.index}"
