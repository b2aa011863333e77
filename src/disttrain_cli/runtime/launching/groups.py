"""Connection test of a rank's process groups, one after the other, each within time limits.

NCCL creates a communicator when its group is first used: every member has to join, no other rank
takes part, and there is no time limit. So the members first announce themselves through the store,
and then use the group as training does, with a few bytes, because NCCL connects, and allocates,
what is used: over a group for messages each rank sends to, or receives from, all its peers in one
batch; a CP or EP group exchanges; the others sum. All ranks create their groups in one order
(`communicators`), so that no rank waits for one that waits for it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from disttrain_cli.errors import DisttrainError
from disttrain_cli.models.group import wire
from disttrain_cli.runtime.engine.faults import full_memory
from disttrain_cli.runtime.launching.ending import within
from disttrain_cli.runtime.launching.meeting import MEETING_S, arrive, named
from disttrain_cli.runtime.launching.process import LATE_S, REMEDIES
from disttrain_cli.runtime.units.grid import UnitGrid
from disttrain_cli.spec.stage_graph import RankCoords

CONNECTING_S = 60.0  # time limit for connecting one group, once its members have joined


def check_groups(
    grid: UnitGrid, coords: RankCoords, device: torch.device, limit_s: float
) -> dict[str, float]:
    """Connect every group of this rank, the world first; return the seconds that each took.

    Args:
        limit_s: limit of the wait for the other members of a group, which may be connecting another
            one (at most `MEETING_S`), and of connecting one group (at most `CONNECTING_S`).

    Raises:
        DisttrainError: members are missing, or a group does not work within the limit; the message
            names them and the usual remedies. Where NCCL does not return, the process exits with
            that error.
        dist.DistBackendError: NCCL has no memory for its connections.
    """
    return {name: _connect(name, grid, coords, device, limit_s) for name in grid.groups}


def _connect(
    name: str, grid: UnitGrid, coords: RankCoords, device: torch.device, limit_s: float
) -> float:
    group = grid.groups[name]
    size, backend = dist.get_world_size(group), dist.get_backend(group)
    waited_s, limit_s = min(MEETING_S, limit_s), min(CONNECTING_S, limit_s)
    where = f"unit {coords.unit.name}, stage {coords.stage.index}, host {socket.gethostname()}"

    def unreachable(why: str) -> DisttrainError:
        return DisttrainError(
            f'Rank {coords.rank} cannot reach its group "{name}" ({size} ranks) over {backend}',
            f"{where}: {why}",
            REMEDIES.get(backend, REMEDIES["gloo"]),
        )

    if missing := call_roll(
        group.get_group_store(), dist.get_process_group_ranks(group), coords.rank, waited_s
    ):
        raise DisttrainError(
            f'{len(missing)} of {size} ranks did not join the group "{name}" within {waited_s:g} s:'
            f" {named(missing, ())}",
            f"rank {coords.rank} waited; {where}",
            "Look at the logs of the missing.",
        )
    begun = time.monotonic()
    try:
        with within(limit_s + LATE_S, lambda: unreachable(f"not connected within {limit_s:g} s")):
            arrived, expected = _used(name, grid, coords, device, timedelta(seconds=limit_s))
    except (dist.DistError, RuntimeError) as error:
        if full_memory(error):
            raise
        raise unreachable(str(error).splitlines()[0]) from None
    if arrived != expected:
        raise DisttrainError(
            f'The group "{name}" of rank {coords.rank} gives wrong results over {backend}',
            f"its {size} ranks should give {expected}; they gave {arrived}",
            REMEDIES.get(backend, ""),
        )
    return time.monotonic() - begun


def _used(
    name: str, grid: UnitGrid, coords: RankCoords, device: torch.device, limit: timedelta
) -> tuple[list[float], list[float]]:
    """Use a group once; return the numbers that arrived, and those that should have."""
    group, members = grid.groups[name], dist.get_process_group_ranks(grid.groups[name])
    if name in grid.exchanges:
        sends, peers = grid.exchanges[name]
        start, given = (dist.isend, [coords.rank] * len(peers)) if sends else (dist.irecv, peers)
        rows = torch.full((len(peers), 1), float(coords.rank), device=device)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(start, row, peer, group)
                for row, peer in zip(rows.unbind(), peers, strict=True)
            ]
        )
        for work in works:
            work.wait(limit)
        return rows.flatten().tolist(), [float(rank) for rank in given]
    if any(one is not None and one.ranks is group for one in (grid.cp, grid.ep)):
        sent = torch.full((len(members),), float(coords.rank), device=wire(device, group))
        rows = torch.empty_like(sent)
        work = dist.all_to_all_single(rows, sent, group=group, async_op=True)
        work.wait(limit)
        return rows.tolist(), [float(rank) for rank in members]
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=group, async_op=True).wait(limit)
    return ones.tolist(), [float(len(members))]


def call_roll(store: dist.Store, ranks: Sequence[int], local: int, limit_s: float) -> list[int]:
    """Wait for all members of a group; return those that have not joined within the limit.

    Each member does a constant number of operations on the store.
    """
    arrive(store, "here", local, len(ranks))
    try:
        store.wait(["here/complete"], timedelta(seconds=limit_s))
    except dist.DistError:
        return [rank for rank in ranks if not store.check([f"here/{rank}"])]
    return []
