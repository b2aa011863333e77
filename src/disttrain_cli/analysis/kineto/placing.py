"""Assignment of every file, or every rank in it, to its rank, its job and its offset in time."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.analysis.figures import counted
from disttrain_cli.analysis.kineto.columns import Strings
from disttrain_cli.analysis.kineto.jobs import TraceFile, align, choose_job, count_ranks
from disttrain_cli.analysis.kineto.ranks import (
    TELL_RANKS_APART,
    device_threads,
    label_threads,
    numbers_of,
)
from disttrain_cli.analysis.sql import query_text

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def place(connection: DuckDBPyConnection, read: list[TraceFile], strings: Strings) -> list[str]:
    """Fill the table `files`, and move events to the file of their rank and to one clock if needed.

    Args:
        connection: database with the raw rows.
        read: every file with events, numbered as in the raw rows.
        strings: strings of the raw rows.

    Returns:
        Warnings.
    """
    threads: dict[int, dict[int, str]] = defaultdict(dict)
    for (number, process, _), thread in strings.threads.items():
        threads[number][thread] = str(process)
    files: list[TraceFile] = []
    said: list[str] = []
    free = 1 + max(file.number for file in read)
    for file in read:
        parts, notes = _split(connection, file, threads[file.number], strings, free + len(files))
        files += parts
        said += notes
    said += _split_devices(connection, files, free + len(files))
    _find_copies(connection, [file for file in files if file.number < free])
    said += _crowds(connection, {file.number: file for file in files})
    said += align(files)
    calls = _ranks_in_calls(connection, read)
    said += choose_job(files, sorted({rank for ranks, _ in calls.values() for rank in ranks}))
    kept = {file.path for file in files if file.kept}
    said += count_ranks(
        files,
        max(
            (
                max(size, 1 + max(ranks, default=-1))
                for path, (ranks, size) in calls.items()
                if path in kept
            ),
            default=0,
        ),
    )
    connection.executemany(
        "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            [
                file.number,
                file.path.name,
                file.rank,
                file.world_size,
                file.first_ns,
                file.last_ns,
                file.events,
                file.kept,
                file.base_ns,
                file.shift_ns,
                file.holds,
            ]
            for file in files
        ],
    )
    if any(file.number >= free or file.shift_ns for file in files):
        connection.execute(query_text("kineto/place"))
    return said


def _split(
    connection: DuckDBPyConnection,
    file: TraceFile,
    threads: dict[int, str],
    strings: Strings,
    free: int,
) -> tuple[list[TraceFile], list[str]]:
    """Return the file itself, or a part for every rank named by its threads, and warnings.

    Parts are numbered from `free` on.
    """
    names = {
        process: names
        for (number, process), names in strings.process_names.items()
        if number == file.number
    }
    named = {
        thread: strings.thread_names.get((number, str(process), str(tid)), "")
        for (number, process, tid), thread in strings.threads.items()
        if number == file.number
    }
    labels = label_threads(threads, names, named, strings.recorded_ranks)
    ranks = numbers_of(labels.values())
    devices = device_threads(threads, names) if len(ranks) < 2 and _may_be_split(file) else {}
    by_device = len({*devices.values()}) > 1
    if by_device:
        labels, ranks = dict(devices), {device: device for device in devices.values()}
    if len(ranks) < 2:
        if file.rank is None and ranks:
            file.rank = next(iter(ranks.values()))
        recorded = [strings.recorded_ranks.get(thread, set()) for thread in threads]
        mixed = [len(numbers) for numbers in recorded if len(numbers) > 1 and min(numbers) >= 0]
        why = "their numbers occur together in the arguments of one thread"
        return [file], [_crowd(file, max(mixed), why)] if mixed else []
    parts: dict[int, TraceFile] = {}
    lost = 0
    counts = connection.execute(query_text("kineto/of_threads"), {"file": file.number})
    for thread, events, first_ns, last_ns, works in counts.fetchall():
        if thread not in labels:
            lost += works
            continue
        rank = ranks[labels[thread]]
        part = parts.setdefault(
            rank,
            TraceFile(
                free + len(parts),
                file.path,
                None if by_device else rank,
                file.world_size,
                file.base_ns,
                first_ns,
                last_ns,
                0,
                device=rank if by_device else None,
            ),
        )
        part.first_ns, part.last_ns = min(part.first_ns, first_ns), max(part.last_ns, last_ns)
        part.events += events
    if not parts:
        return [file], []
    homes = {thread: parts.get(ranks[label]) for thread, label in labels.items()}
    connection.executemany(
        "UPDATE threads SET file = ? WHERE id = ?",
        [[home.number, thread] for thread, home in homes.items() if home is not None],
    )
    _share_marks(connection, file, list(parts.values()))
    in_order = any(rank != label for label, rank in ranks.items())
    said = [
        f"{file.path.name} contains {counted(len(parts), 'rank')}, according to its processes,"
        " threads or arguments"
        + (": they are numbered in the order of their labels" if in_order else "")
    ]
    if lost:
        said.append(
            f"{lost} kernels, launches and operators of {file.path.name} name no rank and are"
            " left out"
        )
    return list(parts.values()), said


def _may_be_split(file: TraceFile) -> bool:
    """Return True unless the file says that it is one rank of several."""
    return file.rank is None or (file.world_size or 1) == 1


def _split_devices(connection: DuckDBPyConnection, files: list[TraceFile], free: int) -> list[str]:
    """Split files with several active devices into a part for each device; return warnings.

    In such a file one process uses several devices, or each device has its own process. The parts
    are numbered from `free` on.
    """
    by_number = {file.number: file for file in files}
    said = []
    for number, devices, processes in connection.execute(
        query_text("kineto/devices_at_work")
    ).fetchall():
        if number not in by_number:
            continue
        file = by_number[number]
        launchers: dict[int, str] = {}
        if processes > 1:
            launchers = _launchers(connection, number, devices)
            if not len(launchers) == processes == len(devices):
                continue
        elif not _may_be_split(file):
            continue
        parts = [
            replace(file, number=free + index, rank=None, device=device)
            for index, device in enumerate(devices)
        ]
        free += len(parts)
        copies, *rest = connection.extract_statements(query_text("kineto/by_device"))
        connection.execute(
            copies,
            {
                "file": number,
                "parts": [part.number for part in parts],
                "devices": devices,
                "launchers": [launchers.get(device) for device in devices],
            },
        )
        for statement in rest:
            connection.execute(statement)
        at = files.index(file)
        files[at : at + 1] = parts
        said.append(f"{file.path.name} contains {len(parts)} devices: each is read as a rank")
    return said


def _launchers(connection: DuckDBPyConnection, number: int, devices: list[int]) -> dict[int, str]:
    """Return the process that launched the kernels of each device.

    Only devices are included for which it is certain: one process could have done so that launched
    on no other device.
    """
    possible: dict[int, set[str]] = {}
    rows = connection.execute(
        query_text("kineto/launchers"), {"file": number, "devices": devices}
    ).fetchall()
    for device, process in rows:
        possible.setdefault(device, set()).add(process)
    found: dict[int, str] = {}
    while possible:
        device = min(possible, key=lambda one: len(possible[one]))
        if len(possible[device]) != 1:
            break
        (found[device],) = possible.pop(device)
        for processes in possible.values():
            processes.discard(found[device])
    return found


def _find_copies(connection: DuckDBPyConnection, files: list[TraceFile]) -> None:
    """Set the hashes of files that may be copies of others, compressed or not, by their events."""
    alike: dict[tuple[int, int, int], list[TraceFile]] = defaultdict(list)
    for file in files:
        alike[file.first_ns, file.last_ns, file.events].append(file)
    doubtful = {file.number: file for same in alike.values() if len(same) > 1 for file in same}
    if doubtful:
        hashes = connection.execute(query_text("kineto/hashes"), {"files": [*doubtful]})
        for number, content in hashes.fetchall():
            doubtful[number].content = int(content)


def _ranks_in_calls(
    connection: DuckDBPyConnection, files: list[TraceFile]
) -> dict[Path, tuple[set[int], int]]:
    """Return the ranks in arguments of collectives, and the size of the largest group, by file."""
    found: dict[Path, tuple[set[int], int]] = {}
    paths = {file.number: file.path for file in files}
    for number, members, size in connection.execute(query_text("kineto/groups")).fetchall():
        ranks, largest = found.get(paths[number], (set(), 0))
        named = {int(rank) for rank in re.findall(r"\d{1,7}", members)}
        found[paths[number]] = ranks | named, max(largest, size)
    return found


def _share_marks(connection: DuckDBPyConnection, file: TraceFile, parts: list[TraceFile]) -> None:
    """Copy marks of steps without a rank to every rank of the file."""
    copies, *rest = connection.extract_statements(query_text("kineto/shared"))
    connection.execute(copies, {"file": file.number, "parts": [part.number for part in parts]})
    for statement in rest:
        connection.execute(statement)


def _crowds(connection: DuckDBPyConnection, files: dict[int, TraceFile]) -> list[str]:
    """Return warnings about files of one rank, as far as known, that look like several."""
    return [
        _crowd(
            files[number],
            processes,
            f"{processes} processes run operators, launch kernels, or contain the same events",
        )
        for number, processes in connection.execute(query_text("kineto/crowds")).fetchall()
        if number in files
    ]


def _crowd(file: TraceFile, ranks: int, why: str) -> str:
    file.holds = ranks
    return (
        f"{file.path.name} seems to contain several ranks ({why}) that cannot be separated: it is"
        " read as one rank, so their times add up and waiting between them is not visible."
        f" {TELL_RANKS_APART}"
    )
