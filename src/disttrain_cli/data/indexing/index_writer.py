"""Writer of the index as a Parquet file, written atomically."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.data.index.index_file import schema
from disttrain_cli.spec.index import COLUMNS
from disttrain_cli.spec.whole import whole_file

if TYPE_CHECKING:
    import pyarrow as pa


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
