"""Host memory of a rank over a long run: free heap pages are returned, growth is extrapolated."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

MIB = 2**20
#: Growth of resident memory between two trims: the larger of bytes and a share of resident memory.
SLACK_BYTES, SLACK_SHARE = 32 * MIB, 1 / 16
#: Largest share of a rank's time for trimming.
TRIM_TIME_SHARE = 0.005
#: Steps that are ignored, in which buffers and caches fill.
WARM_UP_STEPS = 100
#: Number of minima of resident memory, each over one step at first. At this number growth is
#: estimated, and pairs are merged, so that each covers twice as many steps.
MINIMA = 256


class HostMemory:
    """Trimming of a process's freed memory, and measurement of the growth of the rest.

    PyTorch's CPU tensors are aligned allocations. glibc seldom reuses a freed one for the next: a
    small allocation has taken what alignment left over (glibc bug 14581). With constant use the
    heap grows by 1 to 5 MiB a step; `malloc_trim` returns its free pages
    (docs/decisions/18-host-memory.md).
    """

    def __init__(
        self, resident_bytes: Callable[[], int], trim: Callable[[], object] | None
    ) -> None:
        self._resident_bytes, self._trim = resident_bytes, trim
        self._base_bytes: int | None = None  # resident after the first step since the last trim
        self._next_trim_s = 0.0
        self._step, self._stride = 0, 1
        self._minima: list[int] = []  # resident bytes of `_stride` steps each
        self._growth = 0.0

    def end_step(self) -> float:
        """Record a step; return the growth of resident memory in bytes per step, at least 0."""
        resident_bytes = self._resident_bytes()
        if self._trim is not None:
            self._trim_where_grown(resident_bytes, self._trim)
        recorded, self._step = self._step - WARM_UP_STEPS, self._step + 1
        if recorded < 0:
            return 0.0
        if recorded % self._stride:
            self._minima[-1] = min(self._minima[-1], resident_bytes)
        else:
            self._minima.append(resident_bytes)
        if recorded + 1 == MINIMA * self._stride:
            self._growth = _growth_of(self._minima) / self._stride
            pairs = zip(self._minima[::2], self._minima[1::2], strict=True)
            self._minima, self._stride = [min(pair) for pair in pairs], 2 * self._stride
        return self._growth

    def _trim_where_grown(self, resident_bytes: int, trim: Callable[[], object]) -> None:
        if self._base_bytes is None:
            self._base_bytes = resident_bytes
        begin_s = time.monotonic()
        if resident_bytes > self._base_bytes + slack_bytes(self._base_bytes) and (
            begin_s >= self._next_trim_s
        ):
            trim()
            taken_s = time.monotonic() - begin_s
            self._base_bytes, self._next_trim_s = None, begin_s + taken_s / TRIM_TIME_SHARE


def slack_bytes(base_bytes: int) -> float:
    """Return the growth of resident memory from one trim to the next."""
    return max(SLACK_BYTES, SLACK_SHARE * base_bytes)


def _growth_of(minima: list[int]) -> float:
    """Return the growth in bytes per entry: the smallest from one quarter to the next.

    The smallest, so that caches that fill once do not count; 0 if all growth is within twice what
    trims allow.
    """
    quarter = len(minima) // 4
    lowest = [min(minima[begin : begin + quarter]) for begin in range(0, 4 * quarter, quarter)]
    least = min(after - before for before, after in pairwise(lowest))
    return max(0, least) / quarter if lowest[-1] - lowest[0] > 2 * slack_bytes(lowest[0]) else 0.0


def watched_memory() -> HostMemory:
    """Return the monitor of this process's memory.

    Without trimming where libc has no `malloc_trim`, without values where there is no /proc.
    """
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return HostMemory(resident_bytes, None)
    return HostMemory(resident_bytes, lambda: malloc_trim(0))


def share_of_host(bytes_per_rank: float, ranks: int) -> float:
    """Return the share of this host's available memory that a growth in each rank takes.

    0 where the system does not report available memory.

    Args:
        bytes_per_rank: growth in each of `ranks` processes.
    """
    if (
        not bytes_per_rank
        or (available := re.search(r"MemAvailable:\s+(\d+)", text_of("/proc/meminfo"))) is None
    ):
        return 0.0
    limits = [limit - used for limit, used in container_limits()]
    available_bytes = min([1024 * int(available[1]), *limits])
    return bytes_per_rank * ranks / max(available_bytes, 1)


def container_limits(root: Path = Path("/sys/fs/cgroup")) -> list[tuple[int, int]]:
    """Return (limit, use) in bytes of each of this process's control groups that has a limit.

    Use excludes reclaimable file pages. Version 2 control groups come first, then version 1.
    """
    own = re.search(r"^0::/(.*)$", text_of("/proc/self/cgroup"), re.MULTILINE)
    folders = {root / own[1] if own else root: None, root: None, root / "memory": None}
    limits = []
    for folder in folders:
        for limit, used, pages in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            read = [text_of(folder / name).strip() for name in (limit, used)]
            reclaimable = re.search(
                rf"^{pages} (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE
            )
            if all(text.isdigit() for text in read):
                limits.append(
                    (int(read[0]), int(read[1]) - int(reclaimable[1] if reclaimable else 0))
                )
    return limits


def resident_bytes() -> int:
    """Return the unshared resident memory of this process (0 where the system has no /proc)."""
    fields = text_of("/proc/self/statm").split()
    if not fields:
        return 0
    _, resident, shared, *_ = fields
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def text_of(path: str | Path) -> str:
    """Return the text of a system file, "" where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
