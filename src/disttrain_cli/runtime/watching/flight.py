"""PyTorch's flight recorder: what this rank has asked its process groups for, dumped when the job
hangs (`disttrain analyze` reads it).

It records from the start unless TORCH_FR_BUFFER_SIZE, or TORCH_NCCL_TRACE_BUFFER_SIZE, is 0.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from disttrain_cli.spec.rundir import flight_recorder

#: How many operations are kept; the first that is set counts. torch's own default is 2,000.
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def records() -> bool:
    """Whether ranks with this environment record."""
    given = [os.environ[name] for name in SIZES if name in os.environ]
    return not given or given[0].strip() != "0"


def write_dump(logs: Path, rank: int) -> None:
    """Leave this rank's dump as torch would name it, if there is one; nothing that goes wrong with
    it is told."""
    # a process without torch has joined no group
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is None or not records():
        return
    with suppress(Exception):
        folder = flight_recorder(logs)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank_{rank:05d}").write_bytes(dump())
