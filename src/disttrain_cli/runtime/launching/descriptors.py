"""Limits of a rank's open files and connections: 1,024 by default; a job of 1,296 ranks needs more.

Counted on Linux with torch 2.13 (the tests count again): a gloo group holds a connection to each of
its other ranks, a listener and three more; a lazily connecting group holds those to the ranks that
it has communicated with. The process that serves the rendezvous holds a connection to every client.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Sequence

from disttrain_cli.errors import DisttrainError

#: Reserve for the rest: data, logs, traces, small groups, the device's driver, NCCL's connections.
RESERVE = 512
#: Connections of a rank to the rendezvous: the rank's, and one of NCCL's watchdog.
CLIENTS = 2


def gloo_group(size: int, lazy: bool = False, talks_to: int = 0) -> int:
    """Return the descriptors of a gloo group of `size` ranks.

    Args:
        lazy: connections are made at first use.
        talks_to: ranks that a lazy group has communicated with.
    """
    return 4 + (talks_to if lazy else size - 1)


def checkpoint_peers(world_size: int, first: bool) -> int:
    """Return the number of ranks that one communicates with for checkpoints.

    All send to the first one; sizes go round a ring, barriers along a tree.
    """
    return world_size - 1 if first else min(world_size - 1, 3 + 2 * (world_size - 1).bit_length())


def rendezvous_server(clients: int) -> int:
    """Return the descriptors of the process that serves the rendezvous."""
    return 9 + clients


def needed(world_size: int, groups: Sequence[int], *, gloo: bool, first: bool, serves: bool) -> int:
    """Return the descriptors that a rank needs at most.

    Args:
        groups: sizes of this rank's groups other than the world.
        gloo: the groups use gloo; else NCCL, and only checkpoints have a gloo group, which is lazy.
        first: this is rank 0, which gathers the contents of checkpoints.
        serves: this process serves the rendezvous.
    """
    made = (
        2 * gloo_group(world_size) + sum(map(gloo_group, groups))
        if gloo
        else gloo_group(world_size, lazy=True, talks_to=checkpoint_peers(world_size, first))
    )
    return RESERVE + made + CLIENTS + (rendezvous_server(CLIENTS * world_size) if serves else 0)


def raise_limit(count: int) -> None:
    """Raise this process's limit of descriptors to the hard limit, or to `count` if there is none.

    Raises:
        DisttrainError: the hard limit is below `count`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # then set `count`, as some systems refuse more
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
