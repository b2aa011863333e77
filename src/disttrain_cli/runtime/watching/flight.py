"""PyTorch's flight recorder: this rank's collectives, dumped when the job hangs.

`disttrain analyze` reads the dump. It records from the start unless TORCH_FR_BUFFER_SIZE, or
TORCH_NCCL_TRACE_BUFFER_SIZE, is 0.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from disttrain_cli.spec.rundir import flight_recorder

#: Variables for the number of recorded operations; the first that is set counts. torch's default
#: is 2,000.
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def records() -> bool:
    """Return True if ranks with this environment record."""
    given = [os.environ[name] for name in SIZES if name in os.environ]
    return not given or given[0].strip() != "0"


def write_dump(logs: Path, rank: int) -> None:
    """Write this rank's dump under torch's name for it, if there is one; errors are ignored."""
    # a process that has not imported torch has joined no group
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is None or not records():
        return
    with suppress(Exception):
        folder = flight_recorder(logs)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank_{rank:05d}").write_bytes(dump())
