"""torchrun's agent on one host, which exits with the exit code of a failed rank.

As a program, it takes torchrun's arguments. It prints only what no rank can: that a rank was killed
(a rank that fails reports its own error), and which hosts are missing (torchrun starts no rank
before all hosts have joined).
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, static_tcp_rendezvous
from torch.distributed.run import main as torchrun

from disttrain_cli.errors import DisttrainError
from disttrain_cli.runtime.launching.meeting import (
    HOSTS,
    MEETING_S,
    arrive,
    check_name,
    named,
    wait_for_all,
    wait_for_the_first,
)
from disttrain_cli.runtime.launching.process import rendezvous


class Rendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
    """Rendezvous of hosts that names the missing ones.

    torchrun's would listen on every interface of the first host, and wait for the others without
    any output.
    """

    _store: dist.Store | None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all hosts; raises DisttrainError with the names of missing ones."""
        if self._store is None:
            os.environ |= {
                "RANK": str(self.rank),
                "WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": self.master_addr,
                "MASTER_PORT": str(self.master_port),
            }
            check_name(self.master_addr)
            store, hosts = (
                rendezvous(timedelta(seconds=MEETING_S)),
                os.environ.get(HOSTS, "").split(),
            )
            arrive(store, "hosts", self.rank, self.world_size)
            if self.rank == 0:
                wait_for_all(
                    store,
                    "hosts",
                    self.world_size,
                    MEETING_S,
                    lambda missing: DisttrainError(
                        f"{len(missing)} of {self.world_size} hosts did not start within"
                        f" {MEETING_S:g} s: {named(missing, hosts)}",
                        f"hosts join at {self.master_addr}:{self.master_port}",
                        "Start the script of every host, and look at what it says there.",
                    ),
                    kind="hosts",
                    hosts=hosts,
                    say=partial(print, flush=True),
                )
            else:
                wait_for_the_first(store, "hosts/complete", MEETING_S)
            self._store = store
        return super().next_rendezvous()


def main() -> None:
    """Run the ranks of this host."""
    static_tcp_rendezvous.StaticTCPRendezvous = Rendezvous
    try:
        torchrun()
    except DisttrainError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        killed = {
            rank: failure.signal_name()
            for rank, failure in error.failures.items()
            if failure.exitcode < 0
        }
        for rank, name in killed.items():
            if name != "SIGTERM":  # sent by the agent to the other ranks after a failure
                print(f"rank {rank} ({socket.gethostname()}) was killed by {name}", file=sys.stderr)
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)


if __name__ == "__main__":
    main()
