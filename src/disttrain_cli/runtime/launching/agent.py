"""torchrun's agent on one host, which ends with the exit code of a rank that failed and says only what no rank can.

As a program, it takes torchrun's arguments. A rank that fails has told why; that one was killed it cannot tell.
"""

from __future__ import annotations

import socket
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> None:
    """Run the ranks of this host."""
    try:
        torchrun()
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        killed = {rank: failure.signal_name() for rank, failure in error.failures.items() if failure.exitcode < 0}
        for rank, name in killed.items():
            if name != "SIGTERM":  # the agent's own, to the ranks beside one that failed
                print(f"rank {rank} ({socket.gethostname()}) was killed by {name}", file=sys.stderr)
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)


if __name__ == "__main__":
    main()
