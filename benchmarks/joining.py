"""1,296 ranks join a job through the real store: seconds until all have met, called the roll of all
their groups and are built, and the descriptors of the process that serves it.

Ranks are threads of a few processes, so that a small machine carries all of them; what they do is
what a rank over NCCL does with the store, in its order: `process.rendezvous`, `meeting.meet`,
`groups.call_roll` for each of its groups, one after the other, and `meeting.wait_until_built`. What
torch does itself is done after it: a second connection for NCCL's watchdog, and an identifier of
128 bytes per communicator, which its first rank sets and the others get. Rank 0 has a process of
its own, which serves the store as in a job that srun starts; descriptors are counted there.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch.distributed as dist

from benchmarks.common import Tables, main
from benchmarks.layouts import Shape, even_units
from disttrain_cli.runtime.launching.descriptors import CLIENTS, raise_limit, rendezvous_server
from disttrain_cli.runtime.launching.groups import call_roll
from disttrain_cli.runtime.launching.meeting import Guest, meet, wait_until_built
from disttrain_cli.runtime.launching.process import rendezvous
from disttrain_cli.runtime.units.communicators import Communicator, communicators
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.stage_graph import StageGraph, stage_graph

LIMIT_S = 600.0
PROCESSES = 8  # of ranks other than 0
#: TP, DP, PP of every unit: 1,296 ranks, and as many as show that it runs.
LARGE = {"encoder": (1, 108, 1), "llm": (8, 18, 6), "generator": (4, 81, 1)}
SMALL = {"encoder": (1, 4, 1), "llm": (2, 2, 2), "generator": (2, 2, 1)}
FACTS = {f"fact {number}": "0123456789abcdef" * 4 for number in range(10)}


def graph_of(shapes: dict[str, Shape]) -> StageGraph:
    """Stages of units one after the other."""
    units = even_units(shapes, {name: pp for name, (_, _, pp) in shapes.items()})
    gpus = sum(unit.gpus for unit in units)
    return stage_graph(
        Layout(global_batch_size=1, microbatch_size=1, microbatches=1, units=units, gpus_used=gpus),
        "llm",
    )


def join(graph: StageGraph, rank: int, ways: list[Communicator]) -> Iterator[str]:
    """What a rank does with the store; yields what it has done, in turn."""
    store = rendezvous(timedelta(seconds=LIMIT_S))
    watchdog = store.clone()
    yield "connected"
    meet(store, rank, graph.world_size, Guest(FACTS), lambda guests: {}, LIMIT_S, say=print)
    yield "met"
    for number, way in enumerate([None, *ways]):
        ranks = range(graph.world_size) if way is None else way.ranks
        if rank in ranks:
            of_group = dist.PrefixStore(str(number), store)
            assert call_roll(of_group, list(ranks), rank, LIMIT_S) == []
            if rank == ranks[0]:
                of_group.set("id", b"0" * 128)
            else:
                of_group.get("id")
    yield "groups"
    wait_until_built(store, graph, rank, LIMIT_S)
    yield "built"
    del watchdog


def live(graph: StageGraph, ranks: range, port: int, tell: Connection, hear: Connection) -> None:
    """Run ranks as threads; tell when each step was done by all of them, and what that took."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(ranks[0]), "WORLD_SIZE": str(graph.world_size)}
    own = psutil.Process()
    raise_limit(rendezvous_server(CLIENTS * graph.world_size) + 256)
    before, ways = own.num_fds(), list(communicators(graph, messages=True))
    done: dict[str, float] = {}
    lock = threading.Lock()

    def run(rank: int) -> None:
        for what in join(graph, rank, ways):
            with lock:
                done[what] = time.monotonic()
            if what == "built":
                arrived.wait()
                leaving.wait()

    arrived, leaving = threading.Barrier(len(ranks) + 1), threading.Event()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    arrived.wait()
    tell.send((done, own.num_fds() - before, sum(own.cpu_times()[:2])))
    hear.recv()  # everybody is there: the connections were all open
    tell.send(own.num_fds() - before)
    hear.recv()
    leaving.set()
    for thread in threads:
        thread.join()


def measure(small: bool) -> Tables:
    """One job."""
    graph = graph_of(SMALL if small else LARGE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    others = -(-(graph.world_size - 1) // (2 if small else PROCESSES))
    parts = [range(1)] + [
        range(first, min(first + others, graph.world_size))
        for first in range(1, graph.world_size, others)
    ]
    context = multiprocessing.get_context("fork")
    begun, children = time.monotonic(), []
    for part in parts:
        (hear, tell), (ear, word) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        child = context.Process(target=live, args=(graph, part, port, tell, ear))
        child.start()
        children.append((child, hear, word))
    told = [hear.recv() for _, hear, _ in children]
    counted = []
    for _, hear, word in children:
        word.send(None)
        counted.append(hear.recv())
    for child, _, word in children:
        word.send(None)
        child.join()
    seconds = {
        what: max(done[what] for done, _, _ in told) - begun
        for what in ("connected", "met", "groups", "built")
    }
    row: dict[str, Any] = {
        "ranks": graph.world_size,
        "communicators": 1 + sum(1 for _ in communicators(graph, messages=True)),
        **{f"{what} after s": value for what, value in seconds.items()},
        "descriptors of the server": counted[0],
        "counted ahead": rendezvous_server(CLIENTS * graph.world_size) + CLIENTS,
        "CPU s of the server": told[0][2],
    }
    return {"Ranks that join through the store": [row]}


if __name__ == "__main__":
    main(__doc__, measure)
