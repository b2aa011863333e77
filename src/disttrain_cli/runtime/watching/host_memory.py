"""Host memory of a rank over a long run: free heap pages are returned, growth is extrapolated."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

MIB = 2**20
#: Growth of resident memory between two trims: the larger of bytes and a share of what is resident.
SLACK_BYTES, SLACK_SHARE = 32 * MIB, 1 / 16
#: Most of a rank's time that trimming may take.
TRIM_TIME_SHARE = 0.005
#: Steps before memory counts, in which buffers and caches fill.
WARM_UP_STEPS = 100
#: Minima of resident memory that are kept; each is of twice as many steps whenever they are full.
MINIMA = 256


class HostMemory:
    """Returns a process's freed memory to the system, and measures by how much the rest grows.

    PyTorch's CPU tensors are aligned allocations. glibc seldom gives a freed one to the next: a
    small allocation has taken what alignment left over (glibc bug 14581). With constant use the
    heap grows by 1 to 5 MiB a step; `malloc_trim` returns its free pages (docs/log.md).
    """

    def __init__(
        self, resident_bytes: Callable[[], int], trim: Callable[[], object] | None
    ) -> None:
        self._resident_bytes, self._trim = resident_bytes, trim
        self._base_bytes: int | None = None  # resident after the first step since the last trim
        self._next_trim_s = 0.0
        self._step, self._stride = 0, 1
        self._minima: list[int] = []  # resident bytes of `_stride` steps each

    def end_step(self) -> float:
        """Record a step; return the bytes per step by which resident memory grows, 0 where it does
        not."""
        resident_bytes = self._resident_bytes()
        self._trim_where_grown(resident_bytes)
        recorded, self._step = self._step - WARM_UP_STEPS, self._step + 1
        if recorded < 0:
            return 0.0
        if recorded % self._stride:
            self._minima[-1] = min(self._minima[-1], resident_bytes)
        else:
            self._minima.append(resident_bytes)
        growth = self._growth()
        if len(self._minima) == MINIMA and (recorded + 1) % self._stride == 0:
            pairs = zip(self._minima[::2], self._minima[1::2], strict=True)
            self._minima, self._stride = [min(pair) for pair in pairs], 2 * self._stride
        return growth

    def _trim_where_grown(self, resident_bytes: int) -> None:
        if self._trim is None:
            return
        if self._base_bytes is None:
            self._base_bytes = resident_bytes
        slack = max(SLACK_BYTES, SLACK_SHARE * self._base_bytes)
        begin_s = time.monotonic()
        if resident_bytes > self._base_bytes + slack and begin_s >= self._next_trim_s:
            self._trim()
            taken_s = time.monotonic() - begin_s
            self._base_bytes, self._next_trim_s = None, begin_s + taken_s / TRIM_TIME_SHARE

    def _growth(self) -> float:
        """Growth in bytes per step from the third quarter of the steps to the last: 0 below what a
        heap goes up and down by between two trims."""
        quarter = len(self._minima) // 4
        if not quarter:
            return 0.0
        third, last = self._minima[-2 * quarter : -quarter], self._minima[-quarter:]
        grown = min(last) - min(third)
        return grown / (quarter * self._stride) if grown > SLACK_BYTES else 0.0


def watched_memory() -> HostMemory:
    """Return the watch of this process's memory: without trimming where libc has none, without
    figures where there is no /proc."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return HostMemory(resident_bytes, None)
    return HostMemory(resident_bytes, lambda: malloc_trim(0))


def share_of_host(bytes_per_rank: float, ranks: int) -> float:
    """Return what so much more memory in each of `ranks` processes takes of this host's available
    memory, as a share; a container's limit counts where it is lower."""
    if not bytes_per_rank:
        return 0.0
    fields = dict(line.split(":") for line in _read("/proc/meminfo").splitlines())
    available_bytes = 1024 * int(fields["MemAvailable"].split()[0])
    limit, current = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.strip().isdigit():
        available_bytes = min(available_bytes, int(limit) - int(current))
    return bytes_per_rank * ranks / max(available_bytes, 1)


def resident_bytes() -> int:
    """Return the resident memory of this process that is its own (0 where the system has no
    /proc)."""
    fields = _read("/proc/self/statm").split()
    if not fields:
        return 0
    _, resident, shared, *_ = fields
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
