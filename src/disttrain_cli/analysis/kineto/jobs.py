"""Which rank a file is of, which files belong to one job, and from when their times count."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RANK_IN_NAME = re.compile(
    r"(?:^|[^a-z])(?:rank|worker|gpu|device|trainer)[-_. ]?(\d+)", re.IGNORECASE
)
#: Windows of one job lie closer together than this, even where its hosts' clocks differ.
SAME_JOB_S = 3600.0
#: Times beyond this count from 1970, whether a file says so or not: it is September 2001.
SINCE_1970_NS = 10**18
#: What a base may be; with three times of `columns.FARTHEST_US` it still fits into 64 bits.
_LATEST_BASE_NS = 3 * 10**18


@dataclass
class TraceFile:
    """One file that was read, or one rank's part of it; times as written, until `align` moves them
    by `shift_ns`."""

    number: int
    path: Path
    rank: int | None
    world_size: int | None
    base_ns: int | None
    first_ns: int
    last_ns: int
    events: int
    kept: bool = True
    shift_ns: int = 0


def rank_in_header(header: dict[str, Any]) -> tuple[int | None, int | None]:
    """Rank and world size as `distributedInfo` gives them."""
    about = header.get("distributedInfo")
    if not isinstance(about, dict):
        return None, None
    rank, size = about.get("rank"), about.get("world_size")
    return (rank if isinstance(rank, int) and rank >= 0 else None), (
        size if isinstance(size, int) else None
    )


def base_in_header(header: dict[str, Any]) -> int | None:
    """When a file's times begin, in ns since 1970, as Kineto has written since 2024; None where it
    does not."""
    base = header.get("baseTimeNanoseconds")
    return base if isinstance(base, int) and 0 <= base < _LATEST_BASE_NS else None


def devices_in_header(header: dict[str, Any]) -> list[str]:
    """Names of the devices of a file's host, as Kineto gives them."""
    about = header.get("deviceProperties")
    named = (
        [device.get("name") for device in about if isinstance(device, dict)]
        if isinstance(about, list)
        else []
    )
    return [name for name in named if isinstance(name, str)]


def align(files: list[TraceFile]) -> list[str]:
    """Set the times of files that count from different moments on one clock; returns what must be
    said about it.

    Where files tell from when their times count, they count from 1970 afterwards. Whole ns are
    added, so nothing is rounded. Files without a base among others with one count from 1970 where
    their times are that large; else nobody knows, and they are set to begin with the others (where
    collectives end then repairs their clocks).
    """
    if all(file.base_ns is None for file in files):
        return []
    silent = [file for file in files if file.base_ns is None]
    lost = [file for file in silent if file.first_ns < SINCE_1970_NS]
    # they count from 1970 all the same
    whole = any(file.base_ns and file.first_ns >= SINCE_1970_NS for file in files)
    zero = min(file.base_ns or 0 for file in files if file not in lost) if whole else 0
    for file in files:
        if file not in lost:
            file.shift_ns = (file.base_ns or 0) - zero
    if lost:
        others = min(file.first_ns + file.shift_ns for file in files if file not in lost)
        first = min(file.first_ns for file in lost)
        for file in lost:
            file.shift_ns = others - first
    for file in files:
        file.first_ns += file.shift_ns
        file.last_ns += file.shift_ns
    said = []
    if len(silent) > len(lost):
        said.append(
            f"{_some([file for file in silent if file not in lost])} without baseTimeNanoseconds,"
            " which other files have: times are taken to count from 1970"
        )
    if lost:
        said.append(
            f"{_some(lost)} without baseTimeNanoseconds, which other files have: it is not known"
            " from when the times count, so they are set to begin with the others; waiting between"
            " them is known only where collectives end on both"
        )
    return said


def rank_in_name(path: Path) -> int | None:
    """Rank as the file's name gives it, or its folder's: `rank3.json`, `worker0_step_12….json`,
    `rank-3/trace.json`."""
    for name in (path.name, path.parent.name):
        match = _RANK_IN_NAME.search(name)
        if match:
            return int(match.group(1))
    return None


def choose_job(files: list[TraceFile]) -> list[str]:
    """Keep the files of one job and window, each with a rank of its own; returns what must be said
    about it."""
    said = _number(files)
    sizes = {file.world_size for file in files if file.world_size is not None}
    if len(sizes) > 1:
        said += _keep(
            files,
            _largest(
                [
                    [file for file in files if file.world_size in (size, None)]
                    for size in sorted(sizes)
                ]
            ),
            "another world size",
        )
    windows = _windows([file for file in files if file.kept])
    if len(windows) > 1:
        said += _keep(
            files, _largest(windows), "another time: another job, or another window of this one"
        )
    kept = [file for file in files if file.kept]
    first: dict[int | None, TraceFile] = {}
    for file in kept:
        if first.setdefault(file.rank, file) is not file:
            file.kept = False
            said.append(f"{file.path.name} holds rank {file.rank} once more; left out")
    kept = [file for file in files if file.kept]
    size = max((file.world_size or 0 for file in kept), default=0)
    if size > len(kept):
        ranks = {file.rank for file in kept}
        missing = [str(rank) for rank in range(size) if rank not in ranks]
        more = "" if len(missing) <= 8 else f" and {len(missing) - 8} more"
        said.append(
            f"{len(missing)} of {size} ranks {'is' if len(missing) == 1 else 'are'} missing"
            f" ({', '.join(missing[:8])}{more}): these traces do not show who waits for them or"
            " whom they wait for, which lowers the confidence"
        )
    return said


def _number(files: list[TraceFile]) -> list[str]:
    """Ranks for files that name none: from their name, or in order; said."""
    named: list[TraceFile] = []
    numbered: list[TraceFile] = []
    for file in files:
        if file.rank is None:
            file.rank = rank_in_name(file.path)
            (named if file.rank is not None else numbered).append(file)
    taken = {file.rank for file in files}
    free = (rank for rank in range(len(files) + len(taken)) if rank not in taken)
    for file in numbered:
        file.rank = next(free)
    said = []
    if named:
        said.append(f"{_some(named)} without distributedInfo: ranks are taken from file names")
    if numbered:
        said.append(
            f"{_some(numbered)} without distributedInfo and no rank in the name: ranks are numbered"
            " in order"
        )
    return said


def _windows(files: list[TraceFile]) -> list[list[TraceFile]]:
    """Files that lie together in time. Where no rank appears twice, clocks may differ by minutes;
    else by nothing."""
    twice = len({file.rank for file in files}) < len(files)
    windows: list[list[TraceFile]] = []
    until = 0
    for file in sorted(files, key=lambda file: file.first_ns):
        if not windows or file.first_ns > until + (0 if twice else SAME_JOB_S * 1e9):
            windows.append([])
            until = file.last_ns
        windows[-1].append(file)
        until = max(until, file.last_ns)
    return windows


def _largest(groups: list[list[TraceFile]]) -> list[TraceFile]:
    """The group with most ranks, of those the last in time."""
    return max(
        groups,
        key=lambda group: (len({file.rank for file in group}), max(file.last_ns for file in group)),
    )


def _keep(files: list[TraceFile], group: list[TraceFile], why: str) -> list[str]:
    left_out = [file for file in files if file.kept and file not in group]
    for file in left_out:
        file.kept = False
    return [
        f"two jobs or more are mixed here: {_some(left_out)} left out ({why}); {_some(group)}"
        " analysed"
    ]


def _some(files: list[TraceFile]) -> str:
    names = list(dict.fromkeys(file.path for file in files))
    return (
        names[0].name if len(names) == 1 else f"{names[0].name} and {len(names) - 1} more file(s)"
    )
