"""Tables of images and texts: Parquet, and Arrow of Hugging Face datasets (save_to_disk).

Complete row groups of Parquet are read: the most recently used ones are cached, up to `CACHE_BYTES`
for all files of a reader (and one per file that is being read). Arrow files are memory-mapped: only
the used parts are read.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from disttrain_cli.data.sources.columns import Columns, find_columns
from disttrain_cli.data.sources.files import open_file
from disttrain_cli.data.sources.rows import file_at, file_name, read_rows, texts_at
from disttrain_cli.data.sources.samples import (
    ChatForm,
    Compact,
    Location,
    Measured,
    Sample,
    Shard,
    Skipped,
)
from disttrain_cli.errors import DataError
from disttrain_cli.spec.runfile.data import is_url

if TYPE_CHECKING:
    import pyarrow as pa

CACHE_BYTES = 1024 * 1024 * 1024
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow's stream format
#: Read at once of a Parquet file: as many bytes as fit into a core's cache, within these numbers of
#: rows. Slightly less than a power of two, to which Arrow's buffers grow.
BATCH_BYTES, BATCH_ROWS = 1000 * 1024, (8, 1024)
#: Text in row groups that one process reads, if there are several; a row with its image takes about
#: as long as ROW_BYTES more.
PART_BYTES, ROW_BYTES = 64 * 1024 * 1024, 128
RUN_BYTES = 64 * 1024 * 1024  # of row groups that are read without a pause, if there are several


class RowGroups:
    """Cache of the most recently used row groups, of all Parquet files of a reader."""

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._kept: OrderedDict[Any, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> pa.Table | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, key: Any, table: pa.Table) -> None:
        """Add a row group and drop the least recently used ones.

        The newest one stays, whatever its size.
        """
        with self._lock:
            self._bytes += table.nbytes
            self._kept[key] = table
            while self._bytes > self._most_bytes and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes


class ParquetShard:
    """An open Parquet file."""

    def __init__(self, shard: Shard, cache: RowGroups, chat: ChatForm | None = None) -> None:
        self._path, self._cache, self._chat = shard.path, cache, chat
        self._file = _open_parquet(shard.path)
        self._columns = find_columns(self._file.schema_arrow, shard.name, shard.text)
        self._ends = _ends(self._file.metadata)
        self._lock = threading.Lock()  # a Parquet reader is not thread-safe

    def file(self, media: str, location: Location, record: Location) -> bytes:
        return file_at(self._row(self._columns.files.get(media), location.offset), location)

    def file_name(self, media: str, location: Location, record: Location) -> str:
        return file_name(self._columns, media, location)

    def texts(
        self, record: Location, files: Sequence[Measured] = ()
    ) -> list[str | tuple[int, ...]]:
        cells = [self._row(name, record.offset) for name in self._columns.of_texts]
        return texts_at(self._columns, cells, self._chat, files, record.size)

    def _row(self, column: str | None, row: int) -> pa.Array:
        if column is None:
            raise ValueError("the shard has no column of such files")
        group = bisect_right(self._ends, row)
        if group == len(self._ends):
            raise ValueError("the shard has fewer rows")
        key = (self._path, group, column)
        table = self._cache.get(key)
        if table is None:
            with self._lock:
                # another thread may have read it meanwhile
                table = self._cache.get(key)
                if table is None:
                    table = self._file.read_row_group(group, columns=[column])
                    self._cache.keep(key, table)
        first = self._ends[group - 1] if group else 0
        return next(chunk for chunk in table.column(0).slice(row - first, 1).chunks if len(chunk))


class ArrowShard:
    """An open Arrow file."""

    def __init__(self, shard: Shard, chat: ChatForm | None = None) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._chat = chat
        for batch in _arrow_batches(shard.path):
            if isinstance(batch, Skipped):
                break
            self._batches.append(batch)
        self._ends = list(accumulate(len(batch) for batch in self._batches))
        self._columns = (
            find_columns(self._batches[0].schema, shard.name, shard.text) if self._batches else None
        )

    def file(self, media: str, location: Location, record: Location) -> bytes:
        name = self._columns.files.get(media) if self._columns else None
        return file_at(self._row(name, location.offset), location)

    def file_name(self, media: str, location: Location, record: Location) -> str:
        return file_name(self._columns, media, location) if self._columns else ""

    def texts(
        self, record: Location, files: Sequence[Measured] = ()
    ) -> list[str | tuple[int, ...]]:
        if self._columns is None:
            raise ValueError("the shard has no rows")
        cells = [self._row(name, record.offset) for name in self._columns.of_texts]
        return texts_at(self._columns, cells, self._chat, files, record.size)

    def _row(self, name: str | None, row: int) -> pa.Array:
        number = bisect_right(self._ends, row)
        if number == len(self._ends):
            raise ValueError("the shard has fewer rows")
        first = self._ends[number - 1] if number else 0
        if name is None:
            raise ValueError("the shard has no column of such files")
        return self._batches[number].column(name).slice(row - first, 1)


def read_parquet(
    shard: Shard, label: str, chat: ChatForm | None = None
) -> Iterator[Sample | Compact | Skipped]:
    """Read the samples of one Parquet file, or of `Shard.groups` of it, some rows at a time.

    A damaged row group is skipped, except for the rows before the damage.

    Raises:
        DataError: its columns do not identify images and texts.
    """
    import pyarrow as pa

    try:
        file = _open_parquet(shard.path)
    except (pa.ArrowException, OSError) as error:
        reason = f"not a complete Parquet file: {error}"
        yield Skipped(label, "", reason, None, _bytes_of(shard.path), cut=True)
        return
    if not file.metadata.num_rows:  # its columns may have no type
        return
    columns, ends = find_columns(file.schema_arrow, label, shard.text), _ends(file.metadata)
    first, last = shard.groups or (0, len(ends))
    runs, row = deque(_runs(file.metadata, first, last)), _start(ends, first)
    while runs:
        groups, rows = runs.popleft()
        at = _start(ends, groups[0])
        try:
            for batch in file.iter_batches(
                rows, row_groups=groups, columns=columns.names, use_threads=False
            ):
                new = batch.slice(min(row - at, len(batch)))
                # all of it or nothing: after a failure, it is read again
                yield from list(read_rows(new, columns, row, label, chat))
                row, at = row + len(new), at + len(batch)
        except (pa.ArrowException, OSError) as error:
            if rows > 1:  # retry: every group by itself, then every row
                fewer = rows if len(groups) > 1 else 1
                left = [([group], fewer) for group in groups if ends[group] > row]
                runs.extendleft(reversed(left))
                continue
            end = ends[groups[0]]
            lost = f"rows {row} to {end - 1}"
            yield Skipped(label, lost, f"damaged Parquet: {error}", end - row)
            row = end


def read_arrow(
    shard: Shard, label: str, chat: ChatForm | None = None
) -> Iterator[Sample | Compact | Skipped]:
    """Read the samples of one Arrow file; of a damaged one those before the damage.

    Raises:
        DataError: its columns do not identify images and texts.
    """
    from pyarrow import RecordBatch

    row, columns = 0, None
    for batch in _arrow_batches(shard.path, label):
        if isinstance(batch, Skipped):
            yield batch
            return
        if not len(batch):  # its columns may have no type
            continue
        columns = columns or find_columns(batch.schema, label, shard.text)
        for rows in _whole_rows(batch):
            if isinstance(rows, RecordBatch):
                yield from read_rows(rows, columns, row, label, chat)
                row += len(rows)
            else:
                yield Skipped(label, f"row {row}", f"damaged Arrow: {rows}")
                row += 1


def _whole_rows(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch | str]:
    """Yield a batch or, if it is damaged, its rows one by one, or their damage.

    Texts that are not UTF-8 are reported when they are read.
    """
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        rows = [batch.slice(number, 1) for number in range(len(batch))]
    else:
        yield batch
        return
    for row in rows:
        try:
            row.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):
                yield str(error)
                continue
        yield row


def parts_of(shard: Shard) -> list[tuple[Shard, float]]:
    """Split a local Parquet file into parts to read in parallel, with their shares of the work.

    The parts depend only on the file's metadata. Other files, and unreadable ones, are one part.
    """
    import pyarrow as pa

    whole = [(shard, 1.0)]
    if shard.form != "parquet" or is_url(shard.path):
        return whole
    try:
        with _open_parquet(shard.path) as file:
            work = _work(file.metadata, find_columns(file.schema_arrow, shard.name, shard.text))
    except (pa.ArrowException, OSError, DataError):
        return whole
    parts = list(_gathered(work, 0, PART_BYTES))
    if len(parts) < 2:
        return whole
    return [
        (shard._replace(groups=(first, last)), sum(work[first:last]) / max(1, sum(work)))
        for first, last in parts
    ]


def _work(about: Any, columns: Columns) -> list[int]:
    """Return the work for each row group of a file's metadata, in bytes of text."""
    work = list[int]()
    for group in map(about.row_group, range(about.num_row_groups)):
        chunks = map(group.column, range(group.num_columns))
        texts = (one for one in chunks if one.path_in_schema.split(".")[0] in columns.of_texts)
        size = sum(one.total_uncompressed_size for one in texts)
        work.append(size + ROW_BYTES * group.num_rows)
    return work


def _runs(about: Any, first: int, last: int) -> Iterator[tuple[list[int], int]]:
    """Yield (row groups that are read without a pause, rows at a time) of a file's metadata.

    They cover the row groups `first` to before `last`.
    """
    groups = [about.row_group(group) for group in range(first, last)]
    for start, end in _gathered([one.total_byte_size for one in groups], first, RUN_BYTES):
        own = groups[start - first : end - first]
        size = sum(one.total_byte_size for one in own)
        rows = BATCH_BYTES * sum(one.num_rows for one in own) // max(1, size)
        yield list(range(start, end)), min(max(rows, BATCH_ROWS[0]), BATCH_ROWS[1])


def _gathered(sizes: Sequence[int], first: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last + 1) of consecutive row groups from `first` on.

    A range has at most `most` in total, or is one row group.
    """
    start, total = first, 0
    for group, size in enumerate(sizes, first):
        if group > start and total + size > most:
            yield start, group
            start, total = group, 0
        total += size
    if sizes:
        yield start, first + len(sizes)


def _start(ends: list[int], group: int) -> int:
    """Return the first row of a row group."""
    return ends[group - 1] if group else 0


def _ends(about: Any) -> list[int]:
    """Return the row after the end of each row group of a file's metadata."""
    return list(
        accumulate(about.row_group(group).num_rows for group in range(about.num_row_groups))
    )


def _open_parquet(path: str) -> Any:
    import pyarrow.parquet as pq

    if not is_url(path):
        open_file(path)  # fails for a pipe, which would block
        return pq.ParquetFile(path, memory_map=True)
    return pq.ParquetFile(open_file(path).stream(), pre_buffer=True)


def _bytes_of(path: str) -> int:
    """Return the size of a file, 0 if it cannot be opened."""
    try:
        return open_file(path).size
    except OSError:
        return 0


def _arrow_batches(path: str, label: str = "") -> Iterator[pa.RecordBatch | Skipped]:
    """Yield the record batches of an Arrow file (either format), then its damage, if any."""
    import pyarrow as pa

    if is_url(path):
        raise DataError(
            "Arrow files are not read over a URL",
            f"given: {path}",
            "Copy the folder to a local disk, or save the dataset as Parquet.",
        )
    size = rows = read = at = 0
    batches: int | None = None  # of the file format
    try:
        open_file(path)  # fails for a pipe, which would block
        mapped = pa.memory_map(path)
        size = mapped.size()
        whole = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        if whole:
            reader = pa.ipc.open_file(mapped)
            batches = reader.num_record_batches
            given = (reader.get_batch(number) for number in range(batches))
        else:
            given = iter(pa.ipc.open_stream(mapped))
        for batch in given:
            rows, read, at = rows + len(batch), read + 1, 0 if whole else mapped.tell()
            yield batch
        at = size if whole else mapped.tell()
        if not whole and (at < size or mapped.read_at(len(END_OF_STREAM), at - 8) != END_OF_STREAM):
            raise pa.ArrowInvalid(f"the stream does not end with the file, at byte {at}")
    except (pa.ArrowException, OSError) as error:
        reason = f"not a complete Arrow file: {error}"
        if batches is None:
            yield Skipped(label, "", reason, None, size - at, cut=True)
        else:  # all batches of a file but the last have as many rows
            lost = -(-rows * (batches - read) // read) if read else None
            yield Skipped(label, "", reason, lost, size, cut=True)
