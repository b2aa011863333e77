"""Run-queue waits of a process by the kernel's accounting, and cores in use by other processes.

Only Linux reports both.
"""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

UNKNOWN = -1.0


class CoreWait:
    """Run-queue waits of this process's main thread, which computes and sends."""

    def __init__(self, schedule: Path = Path("/proc/self/schedstat")) -> None:
        self._schedule = schedule
        self._before_ns = self._waited_ns()

    def begin_step(self) -> None:
        """Start counting: evaluations and checkpoints between steps are not part of a step."""
        self._before_ns = self._waited_ns()

    def of_step(self) -> float:
        """Return the seconds waited since the step began; `UNKNOWN` without kernel statistics."""
        now_ns = self._waited_ns()
        if self._before_ns is None or now_ns is None:
            return UNKNOWN
        return (now_ns - self._before_ns) / 1e9

    def _waited_ns(self) -> int | None:
        with suppress(OSError, ValueError, IndexError):
            return int(self._schedule.read_text().split()[1])
        return None


class OtherProcesses:
    """Cores in use by processes other than this one and its children."""

    def __init__(self, host: Path = Path("/proc/stat")) -> None:
        self._host = host
        self._before = self._times()

    def cores(self) -> float | None:
        """Return their mean number since the start, or None where unknown.

        The CPU time of children is attributed to this process once they have ended.
        """
        now = self._times()
        if self._before is None or now is None:
            return None
        wall_s, busy_s, own_s = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        return max(0.0, (busy_s - own_s) / wall_s) if wall_s > 0 else None

    def _times(self) -> tuple[float, float, float] | None:
        """Return (clock, busy time of all cores, CPU time of this process and children), in s."""
        with suppress(OSError, ValueError, IndexError):
            ticks = [int(one) for one in self._host.read_text().split("\n")[0].split()[1:9]]
            user, nice, system, _, _, irq, soft, _ = ticks
            busy_s = (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
            used = [
                resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            ]
            return time.monotonic(), busy_s, sum(one.ru_utime + one.ru_stime for one in used)
        return None
