"""Connection test of a rank's process groups, one after the other, each within time limits.

NCCL creates a communicator when its group is first used: every member has to join, no other rank
takes part, and there is no time limit. So the members first announce themselves through the store,
and then send a few bytes. All ranks create their groups in one order (`communicators`), so that no
rank waits for one that waits for it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from disttrain_cli.errors import DisttrainError
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
    """
    return {
        name: _connect(name, group, coords, device, limit_s) for name, group in grid.groups.items()
    }


def _connect(
    name: str, group: dist.ProcessGroup, coords: RankCoords, device: torch.device, limit_s: float
) -> float:
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
    begun, ones = time.monotonic(), torch.ones(1, device=device)
    try:
        with within(limit_s + LATE_S, lambda: unreachable(f"not connected within {limit_s:g} s")):
            dist.all_reduce(ones, group=group, async_op=True).wait(timedelta(seconds=limit_s))
            total = float(ones)
    except (dist.DistError, RuntimeError) as error:
        raise unreachable(str(error).splitlines()[0]) from None
    if total != size:
        raise DisttrainError(
            f'The group "{name}" of rank {coords.rank} sums wrongly over {backend}',
            f"{size} ranks each gave 1; the sum is {total:g}",
            REMEDIES.get(backend, ""),
        )
    return time.monotonic() - begun


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
