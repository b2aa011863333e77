"""Open files and connections of a rank, which the system limits: 1,024 by default, and a job of
1,296 ranks needs more.

Counted on Linux with torch 2.13 (the tests count again): a group of gloo holds a connection to each
of its other ranks, a listener and three more; one that connects when it is first used holds those
that it talks to. The process that serves the rendezvous holds a connection to every client.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Sequence

from disttrain_cli.errors import DisttrainError

#: Reserve for all else: data, logs, traces, small groups, the device's driver, NCCL's connections.
RESERVE = 512
#: Connections of a rank to the rendezvous: its own, and one that NCCL's watchdog makes.
CLIENTS = 2


def gloo_group(size: int, lazy: bool = False, talks_to: int = 0) -> int:
    """Descriptors of a group of gloo; where it is lazy, those it has when it has talked to so many
    ranks."""
    return 4 + (talks_to if lazy else size - 1)


def checkpoint_peers(world_size: int, first: bool) -> int:
    """Ranks that one talks to for checkpoints: all to the first one; sizes go round a ring,
    barriers along a tree."""
    return world_size - 1 if first else min(world_size - 1, 3 + 2 * (world_size - 1).bit_length())


def rendezvous_server(clients: int) -> int:
    """Descriptors of the process that serves the rendezvous."""
    return 9 + clients


def needed(world_size: int, groups: Sequence[int], *, gloo: bool, first: bool, serves: bool) -> int:
    """Descriptors that a rank needs at most.

    Args:
        groups: sizes of this rank's groups besides the world.
        gloo: the groups are gloo's; else NCCL's, and only checkpoints have one of gloo, which is
            lazy.
        first: this is rank 0, which gathers what checkpoints hold.
        serves: this process serves the rendezvous.
    """
    made = (
        2 * gloo_group(world_size) + sum(map(gloo_group, groups))
        if gloo
        else gloo_group(world_size, lazy=True, talks_to=checkpoint_peers(world_size, first))
    )
    return RESERVE + made + CLIENTS + (rendezvous_server(CLIENTS * world_size) if serves else 0)


def raise_limit(count: int) -> None:
    """Allow this process as many descriptors as it may have.

    Raises:
        DisttrainError: those are fewer than `count`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # then what is needed is asked for: some systems refuse more
    unlimited = hard == resource.RLIM_INFINITY
    if soft < (count if unlimited else hard) and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if unlimited else hard, hard))
    if not unlimited and hard < count:
        raise DisttrainError(
            f"Too few open files are allowed on {socket.gethostname()}",
            f"a rank of this job needs up to {count:,}, the hard limit is {hard:,}",
            "Let an administrator raise it (nofile in /etc/security/limits.conf, or LimitNOFILE of"
            f" slurmd), so that this works: ulimit -n {count}",
        )
