"""Reader of disttrain's traces in Chrome JSON (`analyze --perfetto`): the same rows and figures.

The file's header holds all data other than events: the job, the ranks' coordinates, which steps are
measured, and the rows of steps, sizes and samples. Rows of the trace are its events: bars, and
counters of memory. Times are already on one clock.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from pydantic import ValidationError

from disttrain_cli.analysis.job.files import TraceFiles
from disttrain_cli.analysis.kineto.ingest import chunks_of
from disttrain_cli.analysis.kineto.splitting import Reading, split_events
from disttrain_cli.calls import call
from disttrain_cli.errors import DataError
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.trace import TABLES, TRACE_COLUMNS, Job

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

VERSION = 1
#: DuckDB types of the trace's column types.
TYPES = {
    "string": "VARCHAR",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "float64": "DOUBLE",
    "list<int64>": "BIGINT[]",
    "list<string>": "VARCHAR[]",
    "map<string,float64>": "MAP(VARCHAR, DOUBLE)",
}
_WINDOWS = {
    "step": "INTEGER",
    "run": "VARCHAR",
    "start_ns": "BIGINT",
    "end_ns": "BIGINT",
    "compute_end_ns": "BIGINT",
    "window_s": "DOUBLE",
    "covered_s": "DOUBLE",
    "ranks": "BIGINT",
    "warmup": "BOOLEAN",
    "complete": "BOOLEAN",
    "measured": "BOOLEAN",
}
#: Coordinates of a rank, the same in all of its rows.
PLACE = ("unit", "stage", "replica", "tp_rank", "cp_rank", "host")
#: Arguments of a bar.
AMOUNTS = (
    "slot",
    "module",
    "tokens",
    "images",
    "sequences",
    "sum_length_sq",
    "bytes",
    "peer",
    "late_ns",
    "exchange_ns",
    "sm_mhz",
    "power_w",
    "throttle",
)
#: Those that most rows lack.
NULLABLE = AMOUNTS[AMOUNTS.index("exchange_ns") :]


class _Args(msgspec.Struct, gc=False):
    step: int | None = None
    slot: int | None = None
    module: str | None = None
    tokens: int | None = None
    images: int | None = None
    sequences: int | None = None
    sum_length_sq: int | None = None
    bytes: int | None = None
    peer: int | None = None
    late_ns: int = 0
    exchange_ns: int | None = None
    sm_mhz: int | None = None
    power_w: int | None = None
    throttle: int | None = None
    gib: float | None = msgspec.field(name="GiB", default=None)


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    tid: int = -1
    ts: float = 0.0
    dur: float = 0.0
    step: int = -1
    module: str | None = None
    args: _Args | None = None


class _Header(msgspec.Struct):
    version: int
    job: dict[str, Any] | None
    ranks: list[dict[str, str | int]]
    windows: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    sizes: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    experts: list[dict[str, Any]] = []
    name: str | None = None


_EVENTS = msgspec.json.Decoder(list[_Event])


def unpack(file: Path, connection: DuckDBPyConnection) -> TraceFiles:
    """Create and fill the tables of the trace from a file.

    The tables are `segments`, `step_segments`, `size_segments`, `sample_segments`,
    `expert_segments` and `windows`.

    Raises:
        DataError: the file is damaged, or of another version.
    """
    shape = ", ".join(f"{column} {TYPES[kind]}" for column, kind in TRACE_COLUMNS.items())
    connection.execute(f"CREATE TABLE segments ({shape})")
    reading, header = Reading(), None
    runs, threads, origin = dict[int, str](), dict[int, dict[str, Any]](), 0
    for batch in split_events(chunks_of(file, reading, 0, 0, silent), reading):
        if header is None:
            header, origin = _header(file, reading.header)
            runs = {row["step"]: row["run"] for row in header.windows}
            threads = {int(row["rank"]): row for row in header.ranks}
        try:
            events = _EVENTS.decode(b"[" + batch.text + b"]")
        except ValueError as error:
            raise _damaged(file, str(error)) from None
        _insert(
            connection,
            [row for event in events if (row := _row(event, origin, runs, threads)) is not None],
        )
    rows = connection.execute("SELECT count(*) FROM segments").fetchall()[0][0]
    if header is None or reading.truncated or reading.unreadable or reading.failure or not rows:
        raise _damaged(
            file,
            reading.problem
            or reading.failure
            or f"it is truncated or corrupt after {reading.events} events",
        )
    for name, columns in TABLES.items():
        _from_json(
            connection,
            f"{name.removesuffix('s')}_segments",
            {column: TYPES[kind] for column, kind in columns.items()},
            getattr(header, name),
        )
    _from_json(connection, "windows", _WINDOWS, header.windows)
    try:
        job = None if header.job is None else Job.model_validate(header.job)
    except ValidationError:
        raise _damaged(file, "its job was written by another version") from None
    return TraceFiles(job=job, name=header.name)


def _header(file: Path, header: dict[str, Any]) -> tuple[_Header, int]:
    """Return the header, and the origin of the times in ns."""
    try:
        ours = msgspec.convert(header.get("disttrain"), _Header)
        origin = msgspec.convert(header.get("baseTimeNanoseconds"), int)
    except msgspec.ValidationError as error:
        raise _damaged(file, f"its header is incomplete: {error}") from None
    for row in ours.ranks:
        row.setdefault("cp_rank", 0)  # files written before there was CP
    complete = all({"rank", *PLACE} <= row.keys() for row in ours.ranks) and all(
        _WINDOWS.keys() <= row.keys() for row in ours.windows
    )
    if not complete or ours.version != VERSION:
        raise _damaged(file, "its header is incomplete or was written by another version")
    return ours, origin


def _damaged(file: Path, why: str) -> DataError:
    return DataError(
        f"{file} cannot be read",
        why,
        f"Write it again: {call('write_perfetto', 'RUN', file=file)}, or analyse the run itself.",
    )


def _row(
    event: _Event, origin: int, runs: dict[int, str], threads: dict[int, dict[str, Any]]
) -> dict[str, Any] | None:
    """Return a row of the trace for its event; None if the event is no row."""
    index, args = threads.get(event.tid), event.args
    if index is None or args is None:
        return None
    start_ns = origin + round(event.ts * 1000)
    of_rank = {name: index[name] for name in PLACE} | {"rank": event.tid}
    if event.ph == "C" and args.gib is not None and event.step in runs:
        return (
            dict.fromkeys(AMOUNTS, 0)
            | of_rank
            | {
                "run": runs[event.step],
                "step": event.step,
                "slot": -1,
                "module": event.module,
                "peer": -1,
                "operation": "memory",
                "start_ns": start_ns,
                "end_ns": start_ns,
                "bytes": round(args.gib * 2**30),
                **dict.fromkeys(NULLABLE),
            }
        )
    # without a slot: a bar of a whole step
    if event.ph != "X" or args.step not in runs or args.slot is None:
        return None
    return (
        {name: getattr(args, name) for name in AMOUNTS}
        | of_rank
        | {
            "run": runs[args.step],
            "step": args.step,
            "operation": event.cat,
            "start_ns": start_ns,
            "end_ns": start_ns + round(event.dur * 1000),
        }
    )


def _insert(connection: DuckDBPyConnection, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.register(
            "batch",
            {
                name: np.array(
                    [row[name] for row in rows], dtype=object if kind == "string" else None
                )
                for name, kind in TRACE_COLUMNS.items()
            },
        )
        connection.execute("INSERT INTO segments BY NAME SELECT * FROM batch")
        connection.unregister("batch")


def _from_json(
    connection: DuckDBPyConnection, table: str, columns: dict[str, str], rows: list[Any]
) -> None:
    shape = ", ".join(f"{column} {kind}" for column, kind in columns.items())
    connection.execute(f"CREATE TABLE {table} ({shape})")
    connection.execute(
        f"INSERT INTO {table} SELECT unnest(from_json($rows, $shape), max_depth := 2)",
        {"rows": json.dumps(rows), "shape": json.dumps([columns])},
    )
