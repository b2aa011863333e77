"""Who reads which shards for the index: this process, several of them, or several hosts, each its
share of a folder that all see.

What comes out is the same: rows in dataset order. Processes and hosts leave the rows of a shard in
a file (`shard_files`), so that a pass that is interrupted goes on with what is whole.
"""

from __future__ import annotations

import heapq
import os
import socket
from collections.abc import Generator
from concurrent.futures import Future, wait
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from disttrain_cli.data.index_file import ShardRows
from disttrain_cli.data.indexing_processes import reading_processes
from disttrain_cli.data.shard_files import Job, paths_of, read_job, read_rows
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import write_whole

LOOK_S = 0.5  # a signal that comes just before a wait is noticed behind it
EACH_BYTES = 16 * 1024 * 1024  # of shards for which a process is worth its start


class Share(NamedTuple):
    """Which of so many hosts this is, from 0."""

    number: int
    hosts: int

    @property
    def name(self) -> str:
        """As it is given."""
        return f"{self.number}/{self.hosts}"


def in_order(
    run: Run,
    inputs: ModelInputs,
    tokenizer: Tokenizer,
    jobs: list[Job],
    progress: Progress,
    processes: int | None = None,
) -> Generator[ShardRows, None, None]:
    """What each shard brings, in order; those that nobody has read yet are read by so many
    processes, 0 = by this one, None = as many as there are cores and work for them.

    Raises:
        DataError: a shard cannot be read, as `read_job`; of several the first.
        SpecError: the run's folder cannot be written.
    """
    paths = paths_of(run, inputs, tokenizer, jobs)
    left = [number for number, path in enumerate(paths) if not path.is_file()]
    count = _processes([jobs[number] for number in left]) if processes is None else processes
    if left and (unfinished := _unfinished(run)):
        progress(f"{', '.join(unfinished)} not ended: {len(left)} shards are read here", 0, 0)
    with ExitStack() as stack:
        reading: dict[int, Future[None]] = {}
        if count and left:
            read = stack.enter_context(reading_processes(run, inputs, count, progress))
            reading = {number: read(jobs[number], paths[number]) for number in left}
        for number, (job, path) in enumerate(zip(jobs, paths, strict=True)):
            if number in reading:
                _end_of(reading.pop(number))
            yield read_rows(path) or read_job(run, job, inputs, tokenizer)


def _end_of(reading: Future[None]) -> None:
    """Wait for a shard; raise what it raised."""
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
    """Read this host's share of the shards into files that `in_order` takes, on all cores; which
    shards it had.

    Raises:
        DataError, SpecError: as `in_order`.
    """
    own = shares(jobs, share.hosts)[share.number]
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
    """The shards of each host, in order: the largest first to the one that has the fewest bytes, so
    that all hosts find the same."""
    of_hosts: list[list[int]] = [[] for _ in range(hosts)]
    least = [(0, host) for host in range(hosts)]
    for number in sorted(range(len(jobs)), key=lambda number: -_bytes(jobs[number])):
        has, host = heapq.heappop(least)
        of_hosts[host].append(number)
        heapq.heappush(least, (has + _bytes(jobs[number]) + 1, host))
    return [[jobs[number] for number in sorted(own)] for own in of_hosts]


def _bytes(job: Job) -> int:
    """0 where a server does not tell."""
    return job.state.size or 0


def _processes(jobs: list[Job]) -> int:
    """How many are worth their start; 0: this one reads faster alone."""
    worth = sum(map(_bytes, jobs)) // EACH_BYTES
    return min(len(os.sched_getaffinity(0)), len(jobs), worth) if len(jobs) > 1 else 0


def _mark(run: Run, share: Share) -> Path:
    """A file that is there while a host reads its share."""
    name = f"share {share.name.replace('/', ' of ')} on {socket.gethostname()}"
    return run.dir.partial_index / name


def _unfinished(run: Run) -> list[str]:
    """Hosts that have not ended their share."""
    return sorted(path.name for path in run.dir.partial_index.glob("share *"))
