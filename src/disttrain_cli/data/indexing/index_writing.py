"""Writing the index: rows of shards, read now or taken from an earlier index, in dataset order."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.data.index.index_checks import (
    BadSamplesError,
    check_bad,
    check_kept,
    check_same,
    check_sources,
    check_text,
    checked_tokenizer,
    extended,
    list_shards,
    made_for,
    shard_label,
    states_of,
)
from disttrain_cli.data.index.index_file import Indexed, ShardRows, Stored, read_stored, schema
from disttrain_cli.data.index.row_arrays import flat, samples_of
from disttrain_cli.data.indexing.index_rows import digest
from disttrain_cli.data.indexing.lost_samples import NO_SHARD, ReadShard, lost_samples
from disttrain_cli.data.indexing.reading_shards import Share, in_order, read_share
from disttrain_cli.data.indexing.shard_files import Job, drop_files, parts_of_job, paths_of
from disttrain_cli.data.sources import Shard, Skipped
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.data.videos import check_installed
from disttrain_cli.errors import DataError, MismatchError
from disttrain_cli.spec.index import COLUMNS, INDEX_VERSION
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import whole_file

if TYPE_CHECKING:
    import pyarrow as pa


def stored_for(
    run: Run, inputs: ModelInputs, tokenizer: Tokenizer, shards: list[tuple[int, Shard]]
) -> Stored | None:
    """Return the index on disk if it was made for this run file, or for one with fewer sources.

    Raises:
        MismatchError: a shard of it changed or is gone.
    """
    try:
        stored = read_stored(run.dir.index)
        check_same(stored, extended(stored, made_for(run, inputs, tokenizer)))
    except (DataError, MismatchError):
        return None
    check_kept(stored, states_of(shards), shards)
    return stored


def read_share_of(run: Run, inputs: ModelInputs, share: Share, progress: Progress = silent) -> int:
    """Read one host's share of the shards that are not indexed yet; return its number of shards.

    `open_index` then reads their rows from the run's folder.

    Raises:
        DataError, MismatchError, SpecError: as `open_index`.
    """
    check_sources(run)
    tokenizer = checked_tokenizer(run, inputs)
    shards = list_shards(run).shards
    stored = stored_for(run, inputs, tokenizer, shards)
    known = {indexed[:2] for indexed in stored.files} if stored else set()
    jobs = [job for job in _jobs(run, shards) if job.state[:2] not in known]
    return len(read_share(run, inputs, tokenizer, jobs, share, progress))


def write_index(
    run: Run,
    inputs: ModelInputs,
    tokenizer: Tokenizer,
    shards: list[tuple[int, Shard]],
    progress: Progress,
    kept: Stored | None = None,
    broken: Mapping[int, Skipped] | None = None,
    processes: int | None = None,
) -> None:
    """Write the index of the run atomically.

    Rows of shards in `kept`, which must be unchanged, are copied from it; all others are read
    (`reading_shards.in_order`).

    Args:
        broken: rows of `kept` that are skipped, and why; None unless all samples have been decoded.

    Raises:
        DataError: as `index.build_index`.
        SpecError: the index cannot be written.
    """
    if inputs.reads_videos:
        check_installed()
    known = {indexed[:2] for indexed in kept.files} if kept else set()
    jobs = _jobs(run, shards)
    new = [job for job in jobs if job.state[:2] not in known]
    files: list[Indexed] = []
    read_shards: list[ReadShard] = []
    labels = 0
    with (
        closing(in_order(run, inputs, tokenizer, new, progress, processes)) as read,
        writing_index(run.dir.index) as writer,
    ):
        old = _without(kept.by_shard() if kept else iter(()), broken)
        for job in jobs:
            # all in dataset order
            indexed, rows, left_out = next(old if job.state[:2] in known else read)
            assert indexed[:2] == job.state[:2]
            files.append(indexed._replace(time=job.state.time))
            read_shards.append(_read_shard(run, job, samples_of(rows), left_out))
            labels += int(flat(rows, "tokens")[flat(rows, "trained") > 0].sum())
            writer.add(indexed.source, indexed.name, rows)
        skipped = lost_samples(read_shards)
        try:
            good = sum(shard.samples for shard in read_shards)
            check_bad(run, good, [one for _, one in skipped])
        except BadSamplesError:  # repaired shards are read again
            numbers = sorted({number for number, _ in skipped} - {NO_SHARD})
            bad = [part for number in numbers for part in parts_of_job(jobs[number])]
            drop_files(run, paths_of(run, inputs, tokenizer, bad))
            raise
        check_text(sum(indexed.rows for indexed in files), labels)
        writer.close(
            {
                "version": INDEX_VERSION,
                "fingerprint": _content_fingerprint(run, tokenizer, files),
                "inputs": made_for(run, inputs, tokenizer),
                "files": files,
                "skipped": [[index, *one] for index, one in skipped],
            }
        )
    drop_files(run)


def _without(
    shards: Iterator[ShardRows], broken: Mapping[int, Skipped] | None
) -> Iterator[ShardRows]:
    """Yield the shards of an index without its rows `broken`; None = with all of them."""
    import pyarrow as pa

    first = 0
    if broken is None:
        yield from shards
        return
    for indexed, rows, left_out in shards:
        numbers = range(first, first := first + len(rows))
        left_out = [*left_out, *(broken[row] for row in numbers if row in broken)]
        rows = rows.filter(pa.array([row not in broken for row in numbers], pa.bool_()))
        indexed = indexed._replace(rows=len(rows), digest=digest(rows), checked=True)
        yield ShardRows(indexed, rows, left_out)


def _read_shard(run: Run, job: Job, samples: int, skipped: list[Skipped]) -> ReadShard:
    state, shard = job.state, job.shard
    source_path = run.file.data.sources[state.source].path
    alone = shard.path in (source_path, str(run.resolve(source_path)))
    return ReadShard(state.source, shard, job.label, state.size, samples, skipped, alone)


def _jobs(run: Run, shards: list[tuple[int, Shard]]) -> list[Job]:
    """Return a job for every shard in its current state."""
    return [
        Job(state, shard, shard_label(run, shard))
        for (_, shard), state in zip(shards, states_of(shards), strict=True)
    ]


def _content_fingerprint(run: Run, tokenizer: Tokenizer, files: list[Indexed]) -> str:
    """Hash weights, tokenization, and the names, sizes and rows of shards, not times or folders."""
    weights = [source.weight for source in run.file.data.sources]
    shards = [
        [indexed.source, indexed.name, indexed.size, indexed.digest]
        + ["held out"] * indexed.held_out
        for indexed in files
    ]
    content = json.dumps([INDEX_VERSION, tokenizer.fingerprint, weights, shards])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


class IndexWriter:
    """Writer of the rows of one shard after the other; created by `writing_index`."""

    def __init__(self, file: Any) -> None:
        import pyarrow.parquet as pq

        self._file, self._count = file, 0
        self._schema = schema()
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")

    def add(self, source: int, name: str, rows: pa.Table) -> None:
        """Append the rows of a shard, with new columns of the sample's number and shard."""
        import numpy as np
        import pyarrow as pa

        if not len(rows):
            return
        numbers = pa.array(np.arange(self._count, self._count + len(rows), dtype=np.int64))
        head = [
            numbers,
            pa.repeat(pa.scalar(source, pa.int32()), len(rows)),
            pa.repeat(pa.scalar(name), len(rows)),
        ]
        table = pa.table(
            [*head, *(rows.column(column) for column in COLUMNS[3:])], schema=self._schema
        )
        self._writer.write_table(table, row_group_size=len(rows))
        self._count += len(rows)

    def close(self, metadata: dict[str, Any]) -> None:
        """Write the metadata of the index, and sync the file to disk."""
        self._writer.add_key_value_metadata(
            {key: json.dumps(value) for key, value in metadata.items()}
        )
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def drop(self) -> None:
        """Close the Parquet writer; errors of a file that is discarded are ignored."""
        with contextlib.suppress(OSError):
            self._writer.close()


@contextmanager
def writing_index(path: Path) -> Iterator[IndexWriter]:
    """Yield a writer whose file replaces the index at the end; on any failure, the old index stays.

    Raises:
        SpecError: the index cannot be written (missing permission, disk full).
    """
    with whole_file(path) as file:
        writer = IndexWriter(file)
        try:
            yield writer
        finally:
            writer.drop()
