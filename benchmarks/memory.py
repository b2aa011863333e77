"""Resident memory of ranks over a long run: the tiny preset with its sample data, on the CPU.

A rank's memory is what is resident and its own, in MiB, at the first line of progress after a step;
without trims the largest rank grows by 1 to 5 MiB a step (docs/decisions/18-host-memory.md).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import Tables, main
from benchmarks.data_wait import prepared

DEVICES = 6
AT = (20, 100, 250, 500, 750, 1000)  # steps
_PROGRESS = re.compile(r" (\d+)/\d+$")


def measure(small: bool) -> Tables:
    """Memory of every rank at some steps."""
    at = (2, 4) if small else AT
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared(folder, 1 if small else DEVICES)
        return {"Memory of ranks, MiB": list(_rows(folder, at))}


def _rows(folder: Path, at: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "disttrain_cli", "train", "--steps", str(at[-1])]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        assert launcher.stdout is not None
        left = list(at)
        for line in launcher.stdout:
            step = int(found[1]) if (found := _PROGRESS.search(line.rstrip())) else 0
            if left and step >= left[0]:
                left = [later for later in left if later > step]
                if memory := _ranks_mib(launcher.pid):
                    yield {"step": step} | memory
    assert launcher.returncode == 0


def _ranks_mib(launcher: int) -> dict[str, float]:
    """MiB by rank: of the processes that the launcher's starter has forked."""
    (starter,) = [
        process
        for process in psutil.Process(launcher).children()
        if "disttrain_cli.runtime.worker:main" in process.cmdline()
    ]
    held = [process.memory_info() for process in starter.children()]
    return {f"rank {rank}": (one.rss - one.shared) / 2**20 for rank, one in enumerate(held)}


if __name__ == "__main__":
    main(__doc__, measure)
