"""Search for the files of a trace: its folder, its readable segments, and problems of the others.

Segments are Parquet, read in place; a process that ended early, or still records, leaves a stream
of Arrow batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from disttrain_cli.analysis.formats import RECORD
from disttrain_cli.analysis.job.fitting import fitted
from disttrain_cli.analysis.sql import literals, no_glob
from disttrain_cli.calls import argument, spelled
from disttrain_cli.errors import DataError, SpecError
from disttrain_cli.spec.trace import STEP_COLUMNS, TABLES, TRACE_COLUMNS, Job, read_job, segments_of

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection


#: Columns of a step with losses and learning rates.
LEARNED = [
    *("step", "run", "end_ns", "learning_rate", "learning_rates"),
    *("loss_text", "loss_image", "generator_losses"),
    *("evaluation_loss_text", "evaluation_loss_image"),
]


class Footer(NamedTuple):
    """Columns and number of rows in a Parquet file's footer."""

    columns: frozenset[tuple[str, str]]  # name and physical type, of all levels
    rows: int


@dataclass
class TraceFiles:
    """Readable segments of one or several trace folders, their job, and warnings."""

    segments: dict[Path, Footer] = field(default_factory=dict)
    steps: dict[Path, Footer] = field(default_factory=dict)
    sizes: dict[Path, Footer] = field(default_factory=dict)
    samples: dict[Path, Footer] = field(default_factory=dict)
    experts: dict[Path, Footer] = field(default_factory=dict)
    # rows by the names of the fields above
    open_segments: dict[str, pa.Table] = field(default_factory=dict)
    job: Job | None = None
    name: str | None = None  # name of the run, if a file has it
    warnings: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of all segments."""
        return sum(footer.rows for footer in self.segments.values()) + sum(
            map(len, self.open_segments.values())
        )

    @property
    def recorded_rows(self) -> int:
        """Rows of the ranks' segments only."""
        rows = self.open_segments.get("segments", ())
        return sum(footer.rows for footer in self.segments.values()) + len(rows)

    @property
    def all(self) -> list[Path]:
        return [*self.segments, *self.steps, *self.sizes, *self.samples, *self.experts]


def find_traces(paths: list[Path], connection: DuckDBPyConnection) -> TraceFiles:
    """Search folders (a run's folder or its `traces` folder) for readable segments.

    Several folders are parts of one job's trace, each with different ranks (hosts without a shared
    disk).

    Raises:
        DataError: a path does not exist, or no segment with rows can be read in any of them.
    """
    traces = TraceFiles()
    problems: list[str] = []
    ranks: set[str] = set()
    for path in paths:
        if not path.is_dir():
            raise DataError(
                f"There is no trace folder at {path}",
                "a folder with rank-*/segment-*.parquet is needed",
                RECORD,
            )
        folder = (path / "traces" if (path / "traces").is_dir() else path).resolve()
        written = {file.parent.name for file in folder.glob("rank-*/segment-*")}
        again = sorted(written & ranks)
        if again:
            problems.append(
                f"{path} holds {again[0]} again, so it belongs to another job and is left out; "
                f"compare two jobs with {spelled(argument('compare'))}"
            )
            continue
        _read_job(folder, traces)
        before = traces.rows
        for name, pattern, columns in (
            ("segments", "rank-*", TRACE_COLUMNS),
            *((name, name, columns) for name, columns in TABLES.items()),
        ):
            files, recorded = segments_of(folder.glob(pattern))
            kept: dict[Path, Footer] = getattr(traces, name)
            kept |= _readable(files, folder, columns, connection, problems)
            _add_open(traces.open_segments, name, recorded, columns, problems)
        ranks |= written
        if traces.rows == before:
            problems.append(f"{path} contains no readable trace segment")
    if not traces.rows:
        raise DataError(
            f"No readable trace in {', '.join(str(path) for path in paths)}",
            "; ".join(problems[:5]),
            RECORD,
        )
    traces.warnings += problems[:5]
    if len(problems) > 5:
        traces.warnings.append(f"{len(problems) - 5} more trace file(s) could not be read")
    return traces


def first_damaged(files: Iterable[Path]) -> Path | None:
    """Return the first segment with a readable footer but unreadable rows."""
    import duckdb

    for path in files:
        try:
            names = literals([path], no_glob)
            duckdb.execute(f"SELECT count(COLUMNS(*)) FROM read_parquet({names})").fetchall()
        except duckdb.Error:
            return path
    return None


def _read_job(folder: Path, traces: TraceFiles) -> None:
    if traces.job is not None:
        return
    try:
        traces.job = read_job(folder / "job.json")
    except SpecError as error:
        why = f" ({error.why.splitlines()[0].strip()})" if error.why else ""
        traces.warnings.append(f"{error.what}{why}: MFU, predictions and the plan cannot be shown")


def _readable(
    files: list[Path],
    folder: Path,
    columns: dict[str, str],
    connection: DuckDBPyConnection,
    problems: list[str],
) -> dict[Path, Footer]:
    """Return the footers of files with all columns and rows; append the rest to `problems`."""
    footers = _footers(files, connection)
    kept = {}
    for file in files:
        name = file.relative_to(folder)
        if file not in footers:
            problems.append(f"{name} is empty or half-written; skipped")
            continue
        there = {column for column, _ in footers[file].columns}
        missing = [column for column in columns if column not in there]
        if missing:
            problems.append(f"{name} lacks the column(s) {', '.join(missing[:4])}; skipped")
        elif footers[file].rows:
            kept[file] = footers[file]
    return kept


def _add_open(
    tables: dict[str, pa.Table],
    name: str,
    files: list[Path],
    columns: dict[str, str],
    problems: list[str],
) -> None:
    """Add the rows of open segments, up to the end of their processes, to `tables`."""
    import pyarrow as pa

    found = [tables[name]] if name in tables else []
    for file in files:
        try:
            found += [
                fitted(pa.Table.from_batches([batch]), columns) for batch in whole_batches(file)
            ]
        except ValueError as error:
            problems.append(f"{file.parent.name}/{file.name} {error}; skipped")
    if found:
        tables[name] = pa.concat_tables(found, promote_options="default").combine_chunks()


def whole_batches(file: Path) -> list[Any]:
    """Return the complete batches of an Arrow stream, which may be cut off."""
    import pyarrow as pa

    rows: list[Any] = []
    try:
        with pa.ipc.open_stream(pa.BufferReader(file.read_bytes())) as stream:
            rows.extend(stream)
    except (pa.ArrowInvalid, OSError):  # cut within a batch: those before it are complete
        pass
    return rows


def _footers(files: list[Path], connection: DuckDBPyConnection) -> dict[Path, Footer]:
    """Read the footers of all files at once, or of each half if some cannot be read.

    Unreadable files are left out.
    """
    import duckdb

    if not files:
        return {}
    names = literals(files, no_glob)
    try:
        footers = connection.execute(
            "SELECT file_name, list((name, coalesce(type, 'group'))), any_value(num_rows) "
            f"FROM parquet_schema({names}) JOIN parquet_file_metadata({names}) USING (file_name) "
            "GROUP BY file_name"
        ).fetchall()
    except duckdb.Error:
        if len(files) == 1:
            return {}
        half = len(files) // 2
        return _footers(files[:half], connection) | _footers(files[half:], connection)
    return {Path(name): Footer(frozenset(columns), rows) for name, columns, rows in footers}


def recorded_steps(traces: Path) -> list[dict[str, Any]]:
    """Return losses and learning rates of every step of a run, in order.

    A step repeated after resuming counts once, as last done. Unreadable files are left out.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    written, recording = segments_of([traces / "steps"])
    rows: list[dict[str, Any]] = []
    for file in [*written, *recording]:
        try:
            table = (
                pq.read_table(file)
                if file in written
                else pa.Table.from_batches(whole_batches(file))
            )
            rows += fitted(table, STEP_COLUMNS).select(LEARNED).to_pylist()
        except (OSError, ValueError, pa.ArrowException):  # deleted just now, or damaged
            continue
    starts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["run"] is not None and row["end_ns"] is not None:
            starts.setdefault(row["run"], []).append(row)
    steps: dict[int, dict[str, Any]] = {}
    for own in sorted(starts.values(), key=lambda own: min(row["end_ns"] for row in own)):
        first = min(row["step"] for row in own)
        steps = {step: row for step, row in steps.items() if step < first}
        steps |= {row["step"]: row for row in own}
    return [steps[step] for step in sorted(steps)]
