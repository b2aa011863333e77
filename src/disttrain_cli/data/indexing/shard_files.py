"""Reading of one shard for the index, and files with its rows.

The files hold the results of other processes and hosts, or of an interrupted pass, until the index
is complete. Each is an Arrow file whose name is a hash of the shard's state and everything else
that its rows depend on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from disttrain_cli import __version__
from disttrain_cli.data.index.index_checks import State, made_for
from disttrain_cli.data.index.index_file import Indexed, ShardRows
from disttrain_cli.data.indexing.index_rows import digest, shard_rows
from disttrain_cli.data.sources import (
    ChatForm,
    OpenShard,
    RowGroups,
    Shard,
    Skipped,
    open_shard,
    parts_of,
    read_shard,
)
from disttrain_cli.data.sources.files import content_of
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.data.unread_keys import merged
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.index import INDEX_VERSION
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import whole_file

LARGE_BYTES = 64 * 1024 * 1024  # from this size on, a shard is read in parts
SUFFIX = ".arrow"
ABOUT = b"disttrain"  # key of the metadata


class Job(NamedTuple):
    """A shard to read, or a part of it (`Shard.groups`), in its current state.

    Messages name it `label`.
    """

    state: State
    shard: Shard
    label: str
    share: float = 1.0  # share of the shard's work

    @property
    def bytes(self) -> float:
        """Bytes of the shard, or of the part by its share; 0 if the size is not known."""
        return self.share * (self.state.size or 0)


def parts_of_job(job: Job) -> list[Job]:
    """Return the parts of a shard that are read separately, the same for all hosts and passes."""
    if job.bytes < LARGE_BYTES:
        return [job]
    return [job._replace(shard=shard, share=share) for shard, share in parts_of(job.shard)]


def joined(parts: Sequence[ShardRows]) -> ShardRows:
    """Join the rows and metadata of a shard's parts."""
    import pyarrow as pa

    if len(parts) == 1:
        return parts[0]
    rows = pa.concat_tables([part.rows for part in parts])
    unread = sum((Counter(part.indexed.unread) for part in parts), Counter[str]())
    indexed = parts[0].indexed._replace(
        rows=len(rows),
        digest=digest(rows),
        unread=dict(unread),
        unread_keys=merged(part.indexed.unread_keys for part in parts),
    )
    return ShardRows(indexed, rows, [one for part in parts for one in part.skipped])


def read_job(run: Run, job: Job, inputs: ModelInputs, tokenizer: Tokenizer) -> ShardRows:
    """Read a shard, or a part of it, from end to end.

    Raises:
        DataError: as `read_shard`.
    """
    chat = tokenizer.chat and tokenizer.chat.of_model(inputs)
    read = read_shard(job.shard, job.label, chat)
    rows, skipped, unread, unread_keys = shard_rows(
        read, job.label, inputs, tokenizer, _opened(run, job, chat)
    )
    indexed = Indexed(
        *job.state,
        len(rows),
        digest(rows),
        unread,
        unread_keys,
        content_of(job.shard.path),
        held_out=job.shard.held_out,
    )
    return ShardRows(indexed, rows, skipped)


def _opened(run: Run, job: Job, chat: ChatForm | None) -> OpenShard | None:
    """Open the shard if samples are compared (`data.deduplicate`).

    None if it cannot be opened; reading it reports the error.
    """
    if not run.file.data.deduplicate:
        return None
    try:
        return open_shard(job.shard, RowGroups(), chat)
    except (ValueError, OSError):
        return None


def paths_of(run: Run, inputs: ModelInputs, tokenizer: Tokenizer, jobs: list[Job]) -> list[Path]:
    """Return the file of each shard or part; it need not exist."""
    key = fingerprint([INDEX_VERSION, __version__, made_for(run, inputs, tokenizer)])
    return [
        run.dir.partial_index / f"{fingerprint([key, job.state, job.shard, job.label])}{SUFFIX}"
        for job in jobs
    ]


def write_rows(path: Path, read: ShardRows) -> None:
    """Write the rows and metadata of a shard; SpecError if that fails."""
    import pyarrow as pa

    about = json.dumps({"indexed": read.indexed, "skipped": read.skipped})
    form = read.rows.schema.with_metadata({ABOUT: about})
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with whole_file(path) as file:
        with pa.ipc.new_file(file, form, options=options) as writer:
            writer.write_table(read.rows.replace_schema_metadata(form.metadata))
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> ShardRows | None:
    """Read the rows and metadata of a shard; None if there is no readable file."""
    import pyarrow as pa

    if not path.is_file():
        return None
    try:
        with pa.memory_map(str(path)) as mapped:
            rows = pa.ipc.open_file(mapped).read_all()
        about = json.loads(rows.schema.metadata[ABOUT])
        indexed = Indexed(*about["indexed"])
        if len(rows) != indexed.rows:
            return None
        return ShardRows(indexed, rows, [Skipped(*one) for one in about["skipped"]])
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError):
        return None


def drop_files(run: Run, paths: Sequence[Path] | None = None) -> None:
    """Remove these files; None = all."""
    for path in paths or ():
        path.unlink(missing_ok=True)
    if paths is None:
        shutil.rmtree(run.dir.partial_index, ignore_errors=True)
