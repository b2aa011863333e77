"""Ranks of files, selection of the files of one job, and alignment of their clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disttrain_cli.analysis.figures import agree, counted
from disttrain_cli.analysis.kineto.ranks import Label, labels_in_names, natural, numbers_of

#: Windows of one job are closer than this, even if its hosts' clocks differ.
SAME_JOB_S = 3600.0
#: Times beyond this count from 1970, even if the file has no base: it is September 2001.
SINCE_1970_NS = 10**18
#: Largest valid base; with three times of `columns.FARTHEST_US` it still fits into 64 bits.
_LATEST_BASE_NS = 3 * 10**18


@dataclass
class TraceFile:
    """A file that was read, or one rank's part of it.

    Its times are as written, until `align` moves them by `shift_ns`.
    """

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
    device: int | None = None  # device of this part, if a file's devices are its ranks
    holds: int = 1  # apparent number of ranks that cannot be separated
    content: int | None = None  # hash, for files that may be copies of others


def rank_in_header(header: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return rank and world size in `distributedInfo`.

    Without a world size it is that of the largest group listed there.
    """
    about = header.get("distributedInfo")
    if not isinstance(about, dict):
        return None, None
    rank, size, groups = about.get("rank"), about.get("world_size"), about.get("pg_config")
    if size is None and isinstance(groups, list):
        sizes = [group.get("pg_size") for group in groups if isinstance(group, dict)]
        size = max((one for one in sizes if isinstance(one, int)), default=None)
    return (rank if isinstance(rank, int) and rank >= 0 else None), (
        size if isinstance(size, int) else None
    )


def base_in_header(header: dict[str, Any]) -> int | None:
    """Return the base of a file's times in ns since 1970, or None; Kineto writes it since 2024."""
    base = header.get("baseTimeNanoseconds")
    return base if isinstance(base, int) and 0 <= base < _LATEST_BASE_NS else None


def devices_in_header(header: dict[str, Any]) -> list[str]:
    """Return the names of the devices of a file's host, as Kineto writes them."""
    about = header.get("deviceProperties")
    named = (
        [device.get("name") for device in about if isinstance(device, dict)]
        if isinstance(about, list)
        else []
    )
    return [name for name in named if isinstance(name, str)]


def align(files: list[TraceFile]) -> list[str]:
    """Put the times of files with different bases on one clock; return warnings.

    If any file has a base, times count from 1970 afterwards. Whole ns are added, so nothing is
    rounded. Files without a base count from 1970 if their times are that large; otherwise their
    base is unknown, and they are set to begin with the others (the ends of collectives then repair
    their clocks).
    """
    if all(file.base_ns is None for file in files):
        return []
    silent = [file for file in files if file.base_ns is None]
    lost = [file for file in silent if file.first_ns < SINCE_1970_NS]
    # files with a base, whose times count from 1970 anyway
    since_1970 = any(file.base_ns and file.first_ns >= SINCE_1970_NS for file in files)
    zero = min(file.base_ns or 0 for file in files if file not in lost) if since_1970 else 0
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
            " which other files have: times are assumed to count from 1970"
        )
    if lost:
        said.append(
            f"{_some(lost)} without baseTimeNanoseconds, which other files have: the origin of"
            " their times is unknown, so they are shifted to begin with the others; waiting between"
            " them is known only where collectives end on both"
        )
    return said


def choose_job(files: list[TraceFile], named: Sequence[int]) -> list[str]:
    """Keep the files of one job and window, each with a different rank; return warnings.

    Args:
        files: files that were read.
        named: ranks in the arguments of collectives.
    """
    said = _number(files, named)
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
            "different world size",
        )
    windows = _windows([file for file in files if file.kept])
    if len(windows) > 1:
        said += _keep(
            files, _largest(windows), "different time: another job, or another window of this job"
        )
    kept = [file for file in files if file.kept]
    first: dict[int | None, TraceFile] = {}
    for file in kept:
        if first.setdefault(file.rank, file) is not file:
            file.kept = False
            said.append(f"{file.path.name} contains rank {file.rank} again; left out")
    return said


def count_ranks(files: list[TraceFile], least: int) -> list[str]:
    """Set the job's world size in the kept files; return warnings about missing ranks.

    The size is the largest of those in the files, in the arguments of collectives (`least`), and of
    the number of ranks that the files hold.
    """
    kept = [file for file in files if file.kept]
    size = max((file.world_size or 0 for file in kept), default=0)
    size = max(size, least)
    held = sum(file.holds for file in kept)
    for file in kept:
        if max(size, held) > len(kept):
            file.world_size = max(size, held)
    missing = size - held
    if missing <= 0:
        return []
    which = ""
    if held == len(kept):
        ranks = {file.rank for file in kept}
        absent = [str(rank) for rank in range(size) if rank not in ranks]
        more = "" if len(absent) <= 8 else f" and {len(absent) - 8} more"
        which = f" ({', '.join(absent[:8])}{more})"
    return [
        f"{missing} of {size} ranks {agree(missing, 'is', 'are')} missing{which}: these traces do"
        " not show who waits for them or whom they wait for, which lowers the confidence"
    ]


def _number(files: list[TraceFile], named: Sequence[int]) -> list[str]:
    """Number the files without a rank, by their names or in order; return warnings."""
    _forget_local_ranks(files)
    nameless = sorted(
        (file for file in files if file.rank is None),
        key=lambda file: (natural(file.path), file.device or 0),
    )
    from_names, ranks = _ranks_of_names(nameless)
    taken = {file.rank for file in files}
    for file, rank in zip(nameless, ranks, strict=True):
        file.rank = rank
        taken.add(rank)
    free = (
        rank
        for rank in [*sorted(named), *range(len(files) + len(taken) + len(named))]
        if rank not in taken
    )
    numbered = [file for file in nameless if file.rank is None]
    for file in numbered:
        file.rank = next(free)
        taken.add(file.rank)
    own = sorted({file.rank for file in nameless if file.rank is not None})
    if len(own) == len(files) == len(named) and own != [*named]:
        # the names number the ranks of a group, such as one replica
        of_job = dict(zip(own, sorted(named), strict=True))
        for file in nameless:
            file.rank = of_job[file.rank or 0]
    said = []
    if from_names:
        said.append(
            f"{_some(from_names)} without a rank of the job in distributedInfo: ranks are taken"
            " from file names"
        )
    if numbered := [file for file in numbered if file.holds == 1]:
        said.append(
            f"{_some(numbered)} without a rank of the job in distributedInfo or the name: ranks"
            " are numbered in order"
        )
    return said


def _ranks_of_names(files: list[TraceFile]) -> tuple[list[TraceFile], list[int | None]]:
    """Return the files with a rank in their names, and the rank of each file or None.

    It uses the most reliable form of names in which simultaneous files have different ranks.
    """
    devices = {file.device for file in files}
    if len(devices) == len(files) and None not in devices:
        return [], [file.device for file in files]
    for certain, labels in labels_in_names([file.path for file in files]):
        known = [label for label in labels if label is not None]
        if not known or (not certain and len(known) < len(files)) or devices != {None}:
            continue
        same: dict[Label, list[TraceFile]] = {}
        for file, label in zip(files, labels, strict=True):
            if label is not None:
                same.setdefault(label, []).append(file)
        if any(_different(one, certain) for one in same.values()):
            continue
        ranks = numbers_of(known)
        return (
            [file for group in same.values() for file in group],
            [None if label is None else ranks[label] for label in labels],
        )
    return [], [None] * len(files)


def _different(files: list[TraceFile], certain: bool) -> bool:
    """Return True if two files are simultaneous, and so of two ranks.

    If the base of the times is unknown, names that are `certain` may be of one rank at two times.
    """
    return any(
        _at_once(one, other) and not (certain and _lost(one) and _lost(other))
        for index, one in enumerate(files)
        for other in files[:index]
    )


def _lost(file: TraceFile) -> bool:
    return file.base_ns is None and file.first_ns < SINCE_1970_NS


def _forget_local_ranks(files: list[TraceFile]) -> None:
    """Remove the ranks of simultaneous files that all claim the same rank of a job of one.

    Such processes were not started as one job: their ranks give at most the order within a file.
    """
    same: dict[int | None, list[TraceFile]] = {}
    for file in files:
        if file.rank is not None and (file.world_size or 1) == 1:
            same.setdefault(file.rank, []).append(file)
    parts = Counter(file.path for file in files)
    for group in same.values():
        if _different(group, certain=False):
            for file in group:
                file.device, file.rank = file.rank if parts[file.path] > 1 else None, None


def _at_once(one: TraceFile, other: TraceFile) -> bool:
    """Return True if the files were recorded at the same time and are not copies."""
    copy = one.content is not None and one.content == other.content
    return not copy and one.first_ns <= other.last_ns and other.first_ns <= one.last_ns


def _windows(files: list[TraceFile]) -> list[list[TraceFile]]:
    """Group files that are close in time.

    If no rank appears twice, clocks may differ by minutes; else not at all.
    """
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
    """Return the group with most ranks; of several, the last in time."""
    return max(
        groups,
        key=lambda group: (len({file.rank for file in group}), max(file.last_ns for file in group)),
    )


def _keep(files: list[TraceFile], group: list[TraceFile], why: str) -> list[str]:
    left_out = [file for file in files if file.kept and file not in group]
    for file in left_out:
        file.kept = False
    return [
        f"traces of several jobs are mixed: {_some(left_out)} left out ({why}); {_some(group)}"
        " analysed"
    ]


def _some(files: list[TraceFile]) -> str:
    names = list(dict.fromkeys(file.path for file in files))
    if len(names) == 1:
        return names[0].name
    return f"{names[0].name} and {counted(len(names) - 1, 'more file')}"
