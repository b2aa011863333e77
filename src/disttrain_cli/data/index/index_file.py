"""The index as a file (see `spec.index`): read with its metadata, written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from disttrain_cli.calls import call
from disttrain_cli.data.sources.samples import Skipped
from disttrain_cli.errors import DataError, MismatchError
from disttrain_cli.spec.index import COLUMNS, INDEX_VERSION, OPTIONAL

if TYPE_CHECKING:
    import pyarrow as pa

PROFILE = f"Index the data with: {call('profile')}"


class Indexed(NamedTuple):
    """Metadata of a shard in the index: its state when it was read, and a summary of its rows."""

    source: int
    name: str
    size: int
    time: int | str  # of the last change in ns, or the version that a server reports
    rows: int
    digest: str
    unread: dict[str, int]  # by `UNREAD`, the number of files for which the model has no module
    unread_keys: dict[str, int]  # samples by key of their records that no reader reads
    content: str = ""  # hash of its bytes (`sources.files.content_of`)
    checked: bool = False  # True if every image and clip of it has been decoded
    held_out: bool = False  # True if it is of a validation split (`Shard.held_out`)


class ShardRows(NamedTuple):
    """A shard's metadata and rows of the index, and its skipped samples."""

    indexed: Indexed
    rows: pa.Table
    skipped: list[Skipped]


class Stored(NamedTuple):
    """An index on disk; its rows are not read yet."""

    path: Path
    fingerprint: str
    inputs: dict[str, Any]  # everything but the shards that the index depends on
    files: list[Indexed]
    #: With the index of the shard in `files`, or `lost_samples.NO_SHARD`.
    skipped: list[tuple[int, Skipped]]
    file: Any = None  # Parquet file
    flat: Any = None  # or the result of `columns.open_columns`

    def described(self) -> dict[str, Any]:
        """Return the inverse of `stored_of`."""
        return {
            "fingerprint": self.fingerprint,
            "inputs": self.inputs,
            "files": self.files,
            "skipped": [[index, *one] for index, one in self.skipped],
        }

    def by_shard(self, columns: list[str] | None = None) -> Iterator[ShardRows]:
        """Yield every shard with its rows and skipped samples, in order.

        Only `columns` of the rows are read, if passed. The rows of one shard at a time are in
        memory.
        """
        left_out: dict[int, list[Skipped]] = {}
        for index, one in self.skipped:
            left_out.setdefault(index, []).append(one)
        group = 0
        for index, indexed in enumerate(self.files):
            if indexed.rows:
                rows = self.file.read_row_group(group, columns)
            else:
                rows = schema().empty_table()
            group += indexed.rows > 0
            yield ShardRows(indexed, _completed(rows), left_out.get(index, []))


def read_stored(path: Path) -> Stored:
    """Open an index.

    Raises:
        DataError: there is none, or it cannot be read.
        MismatchError: another version of this program wrote it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise DataError(f"There is no sample index at {path}", next_step=PROFILE)
    try:
        file = pq.ParquetFile(path)
        stored: dict[str, Any] = {
            key.decode(): json.loads(value)
            for key, value in file.metadata.metadata.items()
            if not key.startswith(b"ARROW")
        }
        version = stored["version"]
        if version == INDEX_VERSION:
            opened = stored_of(path, stored)._replace(file=file)
            if file.num_row_groups != sum(indexed.rows > 0 for indexed in opened.files):
                raise ValueError("its row groups are not those of the shards it names")
            return opened
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"Cannot read the sample index {path}", str(error), PROFILE) from None
    raise MismatchError(
        f"The sample index {path} has a different version",
        f"index: {version}, this program: {INDEX_VERSION}",
        PROFILE,
    )


def stored_of(path: Path, described: Mapping[str, Any]) -> Stored:
    """Return an index from its description."""
    return Stored(
        path,
        described["fingerprint"],
        described["inputs"],
        [Indexed(*entry) for entry in described["files"]],
        [(index, Skipped(*entry)) for index, *entry in described["skipped"]],
    )


def _completed(rows: pa.Table) -> pa.Table:
    """Add the optional columns that rows lack."""
    import numpy as np
    import pyarrow as pa

    for name in OPTIONAL:
        if name not in rows.column_names:
            kinds = rows.column("kinds").combine_chunks()
            zeros = np.zeros(len(kinds.values), np.int64)
            type_ = schema().field(name).type
            column = pa.ListArray.from_arrays(kinds.offsets, pa.array(zeros, type_.value_type))
            rows = rows.append_column(schema().field(name), column)
    return rows


def schema() -> pa.Schema:
    """Return the columns of the index and their types."""
    import pyarrow as pa

    kinds = {
        "sample": pa.int64(),
        "source": pa.int32(),
        "shard": pa.string(),
        "key": pa.string(),
        "kinds": pa.list_(pa.int8()),
        "tokens": pa.list_(pa.int32()),
        "trained": pa.list_(pa.bool_()),
        "ended": pa.list_(pa.bool_()),
        "widths": pa.list_(pa.int32()),
        "heights": pa.list_(pa.int32()),
        "offsets": pa.list_(pa.int64()),
        "sizes": pa.list_(pa.int64()),
        "parts": pa.list_(pa.int32()),
        "frames": pa.list_(pa.int32()),
        "rates": pa.list_(pa.int64()),
        "contents": pa.list_(pa.int64()),
    }
    return pa.schema([(name, kinds[name]) for name in COLUMNS])
