"""Reading of shards for the index by this process, several processes, or several hosts.

Each host reads its share of a folder that all of them share. The result is the same: rows in
dataset order. Processes and hosts write the rows of a shard to a file (`shard_files`), so that an
interrupted pass resumes with its complete files.
"""

from __future__ import annotations

import heapq
import os
import socket
from collections.abc import Generator
from concurrent.futures import Future, wait
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from disttrain_cli.data.index.index_file import ShardRows
from disttrain_cli.data.indexing.indexing_processes import reading_processes
from disttrain_cli.data.indexing.shard_files import (
    Job,
    joined,
    parts_of_job,
    paths_of,
    read_job,
    read_rows,
)
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import write_whole

LOOK_S = 0.5  # a signal that arrives just before a wait is handled after it
EACH_BYTES = 16 * 1024 * 1024  # of shards, for which starting a process pays


class Share(NamedTuple):
    """Index of this host, from 0, and the number of hosts."""

    number: int
    hosts: int

    @property
    def name(self) -> str:
        """The share as on the command line, N/HOSTS."""
        return f"{self.number}/{self.hosts}"


def in_order(
    run: Run,
    inputs: ModelInputs,
    tokenizer: Tokenizer,
    jobs: list[Job],
    progress: Progress,
    processes: int | None = None,
) -> Generator[ShardRows, None, None]:
    """Yield the rows of each shard, in order; shards that are not read yet are read by `processes`.

    Args:
        processes: 0 = this process reads; None = as many as there are cores and work for them.

    Raises:
        DataError: a shard cannot be read, as `read_job`; of several the first.
        SpecError: the run's folder cannot be written.
    """
    in_parts = [parts_of_job(job) for job in jobs]
    parts = [part for own in in_parts for part in own]
    what = "index shards" if len(parts) == len(jobs) else "index parts of shards"
    paths = paths_of(run, inputs, tokenizer, parts)
    left = [number for number, path in enumerate(paths) if not path.is_file()]
    count = _processes([parts[number] for number in left]) if processes is None else processes
    if left and (unfinished := _unfinished(run)):
        progress(f"{', '.join(unfinished)} not finished: {len(left)} shards are read here", 0, 0)
    with ExitStack() as stack:
        reading: dict[int, Future[None]] = {}
        if count and left:
            read = stack.enter_context(reading_processes(run, inputs, count, progress))
            reading = {number: read(parts[number], paths[number]) for number in left}

        def rows_of(number: int) -> ShardRows:
            if number in reading:
                _end_of(reading.pop(number))
            rows = read_rows(paths[number]) or read_job(run, parts[number], inputs, tokenizer)
            progress(what, number + 1, len(parts))
            return rows

        progress(what, 0, len(parts))
        numbers = iter(range(len(parts)))
        for own in in_parts:
            yield joined([rows_of(number) for number in islice(numbers, len(own))])


def _end_of(reading: Future[None]) -> None:
    """Wait for a shard; raise its error."""
    while not reading.done():
        wait([reading], LOOK_S)
    reading.result()


def read_share(
    run: Run,
    inputs: ModelInputs,
    tokenizer: Tokenizer,
    jobs: list[Job],
    share: Share,
    progress: Progress,
) -> list[Job]:
    """Read this host's share of the shards and their parts into files for `in_order`, on all cores.

    Returns:
        This host's share, files that were read before included.

    Raises:
        DataError, SpecError: as `in_order`.
    """
    parts = [part for job in jobs for part in parts_of_job(job)]
    own = shares(parts, share.hosts)[share.number]
    paths = paths_of(run, inputs, tokenizer, own)
    left = [(job, path) for job, path in zip(own, paths, strict=True) if not path.is_file()]
    what = f"index share {share.name}"
    mark = _mark(run, share)
    write_whole(mark, "")
    if left:
        count = max(1, _processes([job for job, _ in left]))
        with reading_processes(run, inputs, count, progress) as read:
            futures = [read(job, path) for job, path in left]
            for number, future in enumerate(futures, len(own) - len(left)):
                progress(what, number, len(own))
                _end_of(future)
    progress(what, len(own), len(own))
    mark.unlink(missing_ok=True)
    return own


def shares(jobs: list[Job], hosts: int) -> list[list[Job]]:
    """Return the shards of each host, in order.

    The largest shards go first, each to the host with the fewest bytes, so that all hosts compute
    the same shares.
    """
    of_hosts: list[list[int]] = [[] for _ in range(hosts)]
    least = [(0.0, host) for host in range(hosts)]
    for number in sorted(range(len(jobs)), key=lambda number: -jobs[number].bytes):
        has, host = heapq.heappop(least)
        of_hosts[host].append(number)
        heapq.heappush(least, (has + jobs[number].bytes + 1, host))
    return [[jobs[number] for number in sorted(own)] for own in of_hosts]


def _processes(jobs: list[Job]) -> int:
    """Return the number of processes that pay for their start; 0 = this process reads faster."""
    worth = int(sum(job.bytes for job in jobs) // EACH_BYTES)
    return min(len(os.sched_getaffinity(0)), len(jobs), worth) if len(jobs) > 1 else 0


def _mark(run: Run, share: Share) -> Path:
    """Return the path of a file that exists while a host reads its share."""
    name = f"share {share.name.replace('/', ' of ')} on {socket.gethostname()}"
    return run.dir.partial_index / name


def _unfinished(run: Run) -> list[str]:
    """Return the hosts that have not finished their share."""
    return sorted(path.name for path in run.dir.partial_index.glob("share *"))
