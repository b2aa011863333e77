"""Import of Kineto/Chrome JSON into a DuckDB file: raw rows first, then the tables of the measures.

Memory is bounded: one chunk of text, the events decoded from it, and a row group of columns at a
time; DuckDB gets the smallest of `MEMORY_LIMITS` that suffices and spills to disk next to its file.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from disttrain_cli.analysis.figures import agree, counted
from disttrain_cli.analysis.kineto.columns import (
    Columns,
    Extent,
    Strings,
    class_of,
    device_categories,
    keep_names,
    memory,
    spans,
)
from disttrain_cli.analysis.kineto.jobs import (
    TraceFile,
    base_in_header,
    devices_in_header,
    rank_in_header,
)
from disttrain_cli.analysis.kineto.kernels import Patterns, operation, pattern_of, step_of
from disttrain_cli.analysis.kineto.placing import place
from disttrain_cli.analysis.kineto.shapes import item_bytes, shape_of
from disttrain_cli.analysis.kineto.splitting import Reading, read_chunks, split_events
from disttrain_cli.analysis.sql import connect, query_text
from disttrain_cli.analysis.views import inside, publish
from disttrain_cli.errors import DataError
from disttrain_cli.spec.progress import Progress

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

# larger ones are slower: decoded events no longer fit into the processor's cache
CHUNK_BYTES = 2**20
GZIP = b"\x1f\x8b"
ROWS_AT_ONCE = 122_880  # a row group of DuckDB
THREADS = 2
MOST_NAMED = 8  # files in a warning
#: Memory limits of DuckDB, raised until a query fits. A window over one rank must fit into memory.
MEMORY_LIMITS = ("128MB", "256MB", "512MB", "1GB", "2GB", "4GB", "8GB")
#: Queries of every analysis, run once: `queries/kineto/NAME.sql`.
ANSWERS = (
    "totals",
    "iterations",
    "blame",
    "ranks",
    "collectives",
    "top",
    "strange",
    "collective_kinds",
    "operator_rows",
    "launch_rows",
    "queue_rows",
)

#: Queries that repair times of kernels, and how the repaired kernels are reported.
IMPOSSIBLE = {
    "misplaced": ("left out: the start is long before the launch, or far outside the recording"),
    "overlong": (
        "shortened to end before the next one begins: the end is beyond that of later ones of the"
        " stream, or beyond the whole recording"
    ),
}


def ingest(files: list[Path], database: Path, patterns: Patterns, progress: Progress) -> None:
    """Read `files` and write everything that the measures need to the file `database`.

    Raises:
        DataError: no event can be read in any of the files.
    """
    connection = connect(database, memory_limit=MEMORY_LIMITS[0], threads=THREADS)
    try:
        inside(connection)
        connection.execute(query_text("kineto/raw"))
        more = iter(MEMORY_LIMITS[1:])
        warnings: list[str] = []
        is_step = cache(lambda name: step_of(name, patterns) is not None)
        read, strings = _fill(connection, files, is_step, more, warnings, progress)
        progress("measuring", 0, 0)
        _insert_names(
            connection, connection.execute(query_text("kineto/named")).fetchall(), patterns
        )
        warnings += place(connection, read, strings)
        _derive(connection, more, warnings)
        publish(connection, "kineto")
        for text in warnings:
            connection.execute("INSERT INTO warnings VALUES (?)", [text])
        connection.execute("CHECKPOINT")
    finally:
        connection.close()


def _fill(
    connection: DuckDBPyConnection,
    files: list[Path],
    is_step: Callable[[str], bool],
    more: Iterator[str],
    warnings: list[str],
    progress: Progress,
) -> tuple[list[TraceFile], Strings]:
    """Insert the raw rows of all files; return the files that have any, and all strings."""
    strings, rows = Strings(), _Rows(connection)
    read: list[TraceFile] = []
    total = sum(path.stat().st_size for path in files)
    before = 0
    for number, path in enumerate(files):
        reading = Reading()
        host, device = Extent(), Extent()
        for batch in split_events(chunks_of(path, reading, total >> 20, before, progress), reading):
            columns, impossible = spans(number, batch, strings, is_step)
            reading.unreadable += impossible
            of_device = np.isin(columns["category"], device_categories(strings))
            host.include(columns, ~of_device)
            device.include(columns, of_device)
            rows.add(columns)
            keep_names(number, batch.events, strings)
            allocated = memory(number, batch.events, strings)
            if allocated is not None:
                _insert(connection, "raw_memory", allocated)
        before += path.stat().st_size
        extent = host if host else device  # kernels' times may be invalid
        warnings += _about(path, reading, bool(extent))
        if extent:
            connection.execute(
                "INSERT INTO devices SELECT ?, unnest(?::VARCHAR[])",
                [number, devices_in_header(reading.header)],
            )
            read.append(
                TraceFile(
                    number,
                    path,
                    *rank_in_header(reading.header),
                    base_in_header(reading.header),
                    extent.first_ns,
                    extent.last_ns,
                    reading.events,
                )
            )
    rows.flush()
    if not read:
        raise DataError(
            "No readable trace here",
            "; ".join(warnings[:5]),
            "Pass Kineto or Chrome JSON files, as torch.profiler writes them, or a folder of them.",
        )
    _insert(connection, "names", _table(strings.names))
    categories = list(strings.categories)
    _insert(
        connection,
        "categories",
        _table(strings.categories)
        | {"class": np.array([class_of(category) for category in categories], np.int32)},
    )
    _insert(
        connection,
        "threads",
        {
            "id": np.arange(len(strings.threads)),
            "file": np.array([thread[0] for thread in strings.threads], np.int32),
            **{
                name: _strings([str(thread[at]) for thread in strings.threads])
                for at, name in ((1, "process"), (2, "thread"))
            },
            "thread_name": _strings(
                [
                    strings.thread_names.get((thread[0], str(thread[1]), str(thread[2])), "")
                    for thread in strings.threads
                ]
            ),
        },
    )
    if strings.calls:
        connection.executemany(
            "INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [[number, *call] for call, number in strings.calls.items()],
        )
    if strings.shapes:
        connection.executemany("INSERT INTO shapes VALUES (?, ?, ?, ?, ?, ?)", shape_rows(strings))
    for dtype in {call[6] for call in strings.calls}:
        connection.execute("INSERT INTO item_bytes VALUES (?, ?)", [dtype, item_bytes(dtype)])
    for (unpaired,) in _fitting(connection, query_text("kineto/pairs"), more):
        if unpaired:
            warnings.append(
                f"{counted(unpaired, 'begin or end mark')} {agree(unpaired, 'is', 'are')} unmatched"
                " and left out"
            )
    connection.execute("DROP TABLE marks")
    return read, strings


def shape_rows(strings: Strings) -> list[list[Any]]:
    """Return the rows of the table `shapes`."""
    names = list(strings.names)
    return [
        [number, name, *shape_of(names[name], dims, types, concrete)]
        for (name, dims, types, concrete), number in strings.shapes.items()
    ]


def _derive(connection: DuckDBPyConnection, more: Iterator[str], warnings: list[str]) -> None:
    """Create the tables of the measures, one `.sql` file after the other."""

    def ask(name: str) -> list[tuple[Any, ...]]:
        return _fitting(connection, query_text(f"kineto/{name}"), more)

    for name, events in ask("doubles"):
        warnings.append(
            f"{counted(events, 'event')} of {name} {agree(events, 'is', 'are')} duplicated and"
            f" {agree(events, 'counts', 'count')} once"
        )
    ask("launches")
    for name, what in IMPOSSIBLE.items():
        if rows := ask(name):
            warnings.append(_counted(rows, what))
    ask("streams")
    ask("steps")
    ask("understood")
    understood = connection.execute("SELECT how FROM understood").fetchall()[0][0]
    if understood == "kernels":
        ask("kernels")
        ask("evidence")
    else:
        ask("operators")
    if understood == "nothing":
        warnings.append(
            "the traces contain no kernels: figures cover operators on the CPU, or all events if"
            " none is known to be an operator"
        )
    if not connection.execute("SELECT count(*) FROM raw_kernels WHERE measured").fetchall()[0][0]:
        connection.execute(
            "UPDATE raw_kernels SET measured = true; UPDATE steps SET measured = false"
        )
        if connection.execute("SELECT count(*) FROM steps").fetchall()[0][0]:
            warnings.append(
                "nothing was launched in the marked profiler steps: the whole recording is measured"
            )
    for name in (
        "matches",
        "clocks",
        "waits",
        "busy",
        "windows",
        "times",
        "step_lengths",
        "counted",
        "view_events",
        "view_kernels",
        "view_memory",
        "view_queue",
        "view_operators",
        "view_shapes",
        "view_messages",
        "view_losses",
    ):
        ask(name)
    for name in ANSWERS:
        _fitting(connection, f"CREATE TABLE answer_{name} AS {query_text(f'kineto/{name}')}", more)


def _counted(files: list[tuple[str, int, int]], what: str) -> str:
    """Format a warning on kernels of several files (name, rank, number of kernels)."""
    most = ", ".join(f"{name}, rank {rank}: {events}" for name, rank, events in files[:MOST_NAMED])
    rest = len(files) - MOST_NAMED
    more = f"; {counted(rest, 'more file')}" if rest > 0 else ""
    return f"{counted(sum(row[2] for row in files), 'kernel')} {what} ({most}{more})"


def _insert_names(
    connection: DuckDBPyConnection, names: list[tuple[int, str]], patterns: Patterns
) -> None:
    """Fill the tables `kinds` and `step_names` by matching names with the patterns."""
    kinds = [
        (number, pattern, name)
        for number, name in names
        if (pattern := pattern_of(name, patterns)) is not None
    ]
    if kinds:
        _insert(
            connection,
            "kinds",
            {
                "name": np.array([number for number, *_ in kinds], np.int32),
                "kind": _strings([pattern.kind for _, pattern, _ in kinds]),
                "operation": _strings(
                    [
                        operation(name) if pattern.kind == "communication" else ""
                        for _, pattern, name in kinds
                    ]
                ),
                "by_user": np.array([pattern.users for _, pattern, _ in kinds]),
            },
        )
    marks = [
        [number, *mark] for number, name in names if (mark := step_of(name, patterns)) is not None
    ]
    if marks:
        connection.executemany("INSERT INTO step_names VALUES (?, ?, ?, ?)", marks)


def _fitting(
    connection: DuckDBPyConnection, text: str, more: Iterator[str]
) -> list[tuple[Any, ...]]:
    """Run an SQL text in a transaction; out of memory, retry it with the next memory limit."""
    import duckdb

    while True:
        connection.execute("BEGIN")
        try:
            rows = connection.execute(text).fetchall()
            connection.execute("COMMIT")
            return rows
        except duckdb.OutOfMemoryException:
            connection.execute("ROLLBACK")
            limit = next(more, None)
            if limit is None:
                raise
            connection.execute(f"SET memory_limit = '{limit}'")


class _Rows:
    """Buffer of spans that inserts them into the database by row groups."""

    def __init__(self, connection: DuckDBPyConnection) -> None:
        self._connection = connection
        self._waiting: list[Columns] = []
        self._count = 0

    def add(self, columns: Columns) -> None:
        self._waiting.append(columns)
        self._count += len(columns["file"])
        if self._count >= ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self._count:
            columns = {
                name: np.concatenate([part[name] for part in self._waiting])
                for name in self._waiting[0]
            }
            phase = columns.pop("phase")
            complete = phase == ord("X")
            for table, chosen in (("raw_events", complete), ("marks", ~complete)):
                if chosen.all():
                    _insert(self._connection, table, columns, phase if table == "marks" else None)
                elif chosen.any():
                    _insert(
                        self._connection,
                        table,
                        {name: values[chosen] for name, values in columns.items()},
                        phase[chosen] if table == "marks" else None,
                    )
        self._waiting, self._count = [], 0


def _insert(
    connection: DuckDBPyConnection, table: str, columns: Columns, phase: Any = None
) -> None:
    if phase is not None:
        columns = columns | {"phase": phase}
    connection.register("batch", columns)
    connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM batch")
    connection.unregister("batch")


def _table(numbers: dict[str, int]) -> Columns:
    return {"id": np.arange(len(numbers)), "name": _strings(list(numbers))}


def _strings(values: list[str]) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=object)


def chunks_of(
    path: Path, reading: Reading, total_mib: int, before: int, progress: Progress
) -> Iterator[bytes]:
    """Yield chunks of a file, decompressed if it is gzip (by its first bytes).

    A damaged end or a read error is noted in `reading`.
    """
    try:
        with path.open("rb") as source:
            packed = source.read(2) == GZIP
            source.seek(0)
            for chunk in (
                _unpacked(source, reading) if packed else read_chunks(source.read, CHUNK_BYTES)
            ):
                progress("reading traces (MiB)", (before + source.tell()) >> 20, total_mib)
                yield chunk
    except OSError as error:
        reading.failure = error.strerror or str(error)


def _unpacked(source: BinaryIO, reading: Reading) -> Iterator[bytes]:
    """Yield the contents of gzip members, up to a damaged or missing end."""
    unpacker = zlib.decompressobj(wbits=31)
    for packed in read_chunks(source.read, CHUNK_BYTES // 8):
        while packed:
            try:
                yield unpacker.decompress(packed, CHUNK_BYTES)
            except zlib.error:
                reading.truncated = True
                return
            packed = unpacker.unconsumed_tail
            if unpacker.eof:
                packed = unpacker.unused_data + source.read(CHUNK_BYTES // 8)
                if not packed.startswith(GZIP):  # the end, or padding
                    return
                unpacker = zlib.decompressobj(wbits=31)
    reading.truncated = True


def _about(path: Path, reading: Reading, any_rows: bool) -> list[str]:
    """Return warnings about a file."""
    if reading.failure:
        return [
            f"{path.name} cannot be read to its end ({reading.failure}): {reading.events} events"
            " of it are analysed"
        ]
    if reading.problem:
        return [f"{path.name} {reading.problem}; left out"]
    said = []
    if not any_rows:
        said.append(f"{path.name} contains no event with a time; left out")
    if reading.truncated:
        said.append(
            f"{path.name} is truncated: the {reading.events} events before the end are analysed"
        )
    if reading.unreadable:
        said.append(
            f"{counted(reading.unreadable, 'event')} of {path.name}"
            f" {agree(reading.unreadable, 'is', 'are')} malformed and left out"
        )
    return said
