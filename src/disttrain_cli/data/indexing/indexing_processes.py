"""Parallel processes that read shards for the index (`indexing_worker`).

They are started when needed and stopped together.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from disttrain_cli import errors
from disttrain_cli.data.indexing.shard_files import Job
from disttrain_cli.errors import DataError
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.runfile import Run

ATTEMPTS = 2  # attempts to read a shard whose process ends
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # one core per process

#: Requests that the rows of a shard are written to a file.
Read = Callable[[Job, Path], "Future[None]"]


@contextmanager
def reading_processes(
    run: Run, inputs: ModelInputs, count: int, progress: Progress
) -> Iterator[Read]:
    """Yield a function that has a shard read by one of `count` processes.

    `progress` reports processes that end; their shard is then read again. The function's futures
    raise DataError as `read_job` does, or if processes repeatedly end over a shard, and SpecError
    if the file cannot be written.
    """
    task = json.dumps(
        {
            "path": str(run.path.resolve()),
            "file": run.file.model_dump(mode="json"),
            "named": {name: str(path) for name, path in run.file._named.items()},
            "inputs": inputs.model_dump(mode="json"),
        }
    )
    processes = _Processes(task)
    idle: queue.SimpleQueue[subprocess.Popen[str] | None] = queue.SimpleQueue()
    for _ in range(count):
        idle.put(None)

    def read(job: Job, path: Path) -> None:
        held, ended = idle.get(), ""
        try:
            for _ in range(ATTEMPTS):
                process = held = held or processes.start()
                if ended:
                    progress(f"a process ended ({ended}): retrying {job.label}", 0, 0)
                if (answer := _asked(process, [*job, str(path)])) is not None:
                    return _check(answer)
                held, ended = None, _ending(process)
            raise DataError(
                f"The shard {job.label} cannot be read: every process that reads it dies",
                f"{ATTEMPTS} did, the last one {ended}; SIGKILL mostly means that memory ran out",
                "Free memory, or split the shard into smaller ones, and run the command again: it"
                " resumes with the remaining shards.",
            )
        finally:
            idle.put(held)

    with ThreadPoolExecutor(count, "index") as threads:
        try:
            yield lambda job, path: threads.submit(read, job, path)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            processes.end()


class _Processes:
    """All processes of a pass; none starts once the pass is over."""

    def __init__(self, task: str) -> None:
        self._task, self._over = task, False
        self._started: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()

    def start(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._over:
                raise InterruptedError
            # A separate session: Ctrl-C reaches only this process, which ends the others.
            process = subprocess.Popen(
                [sys.executable, "-m", "disttrain_cli.data.indexing.indexing_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=os.environ | ONE_THREAD,
            )
            self._started.append(process)
        _write(process, self._task)
        return process

    def end(self) -> None:
        """Kill every process."""
        with self._lock:
            self._over = True
            for process in self._started:
                process.kill()
        for process in self._started:
            process.wait()


def _asked(process: subprocess.Popen[str], question: object) -> dict[str, list[str]] | None:
    """Send a question; return the answer of the process, None if it ended instead."""
    assert process.stdout is not None
    _write(process, json.dumps(question))
    line = process.stdout.readline()
    return dict(json.loads(line)) if line else None


def _write(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to a process; if it has ended, its missing answer shows that."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _check(answer: dict[str, list[str]]) -> None:
    """Raise the error that a process reported."""
    if "bug" in answer:
        raise RuntimeError("\n".join(answer["bug"]))
    if "error" in answer:
        name, *parts = answer["error"]
        raise getattr(errors, name, DataError)(*parts)


def _ending(process: subprocess.Popen[str]) -> str:
    code = process.wait()
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
