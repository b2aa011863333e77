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
#: Growth of resident memory between two trims: the larger of bytes and a share of what is resident.
SLACK_BYTES, SLACK_SHARE = 32 * MIB, 1 / 16
#: Most of a rank's time that trimming may take.
TRIM_TIME_SHARE = 0.005
#: Steps before memory counts, in which buffers and caches fill.
WARM_UP_STEPS = 100
#: Minima of resident memory that are kept: each of one step, then of twice as many whenever there
#: are so many. Growth is judged then.
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
        self._growth = 0.0

    def end_step(self) -> float:
        """Record a step; return the bytes per step by which resident memory grows, 0 where it does
        not."""
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
    """Return by how much resident memory grows from one trim to the next."""
    return max(SLACK_BYTES, SLACK_SHARE * base_bytes)


def _growth_of(minima: list[int]) -> float:
    """Growth in bytes per entry: the smallest from one quarter to the next, so that what fills once
    does not count; 0 where all is within twice what trims let grow."""
    quarter = len(minima) // 4
    lowest = [min(minima[begin : begin + quarter]) for begin in range(0, 4 * quarter, quarter)]
    least = min(after - before for before, after in pairwise(lowest))
    return max(0, least) / quarter if lowest[-1] - lowest[0] > 2 * slack_bytes(lowest[0]) else 0.0


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
    memory, as a share; 0 where the system does not say how much is available."""
    if (
        not bytes_per_rank
        or (available := re.search(r"MemAvailable:\s+(\d+)", text_of("/proc/meminfo"))) is None
    ):
        return 0.0
    limits = [limit - used for limit, used in container_limits()]
    available_bytes = min([1024 * int(available[1]), *limits])
    return bytes_per_rank * ranks / max(available_bytes, 1)


def container_limits(root: Path = Path("/sys/fs/cgroup")) -> list[tuple[int, int]]:
    """Return limit and use in bytes, without reclaimable file pages, of each control group of this
    process that has a limit: version 2, then version 1."""
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
    """Return the resident memory of this process that is its own (0 where the system has no
    /proc)."""
    fields = text_of("/proc/self/statm").split()
    if not fields:
        return 0
    _, resident, shared, *_ = fields
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def text_of(path: str | Path) -> str:
    """Return the text of one of the system's files, "" where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
