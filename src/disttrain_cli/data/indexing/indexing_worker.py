"""A worker process that reads shards for the index; started by `indexing_processes`.

It reads requests from standard input, one line of JSON each. The first line states the run and
model for all shards, each further one names a shard; the answer to each is a line, too: {}, or the
error. The process ends when its standard input does, also in the middle of a shard: the process
that started it is gone then.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disttrain_cli.data.index.index_checks import State
from disttrain_cli.data.indexing.shard_files import Job, read_job, write_rows
from disttrain_cli.data.sources import Shard
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.errors import DisttrainError
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.runfile import Run, RunFile


def main() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output that a library prints must not mix with answers
    lines = _lines()
    task = json.loads(next(lines))
    run = Run(path=Path(task["path"]), file=RunFile.model_validate(task["file"]))
    run.file._named.update({name: Path(path) for name, path in task["named"].items()})
    inputs, tokenizer = ModelInputs.model_validate(task["inputs"]), read_tokenizer(run)
    for line in lines:
        answer: dict[str, Any] = {}
        try:
            state, shard, label, share, path = json.loads(line)
            job = Job(State(*state), Shard(*shard), label, share)
            write_rows(Path(path), read_job(run, job, inputs, tokenizer))
        except DisttrainError as error:
            answer = {"error": [type(error).__name__, *error.parts]}
        except Exception:  # a bug, reported by the parent process
            answer = {"bug": [traceback.format_exc()]}
        print(json.dumps(answer), file=answers, flush=True)


def _lines() -> Iterator[str]:
    """Yield the lines of standard input; end the process as soon as it ends."""
    read: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            read.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield read.get()


if __name__ == "__main__":
    main()
