"""The last steps of growing traces.

Every rank appends its rows after each step to an open segment, which is eventually replaced by a
Parquet file (`spec.trace`). Rows are never read twice: for an open segment the offset is stored up
to which its stream was read, for a replaced one the number of rows. Steps before the last ones are
dropped, or at the beginning not read at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.analysis.job.files import TraceFiles
from disttrain_cli.analysis.job.fitting import fitted
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.trace import OPEN_SEGMENT, TABLES, TRACE_COLUMNS, Job, read_job

if TYPE_CHECKING:
    import pyarrow as pa

#: A step waits for ranks that are this many steps behind the last reported one; a rank that is
#: further behind has stopped writing traces.
MOST_BEHIND = 2


class Tail:
    """The last steps in a run's traces.

    Args:
        traces: folder of the traces.
        steps: number of steps that are held.
    """

    def __init__(self, traces: Path, steps: int) -> None:
        self._traces, self._steps = traces, steps
        self._job: Job | None = None
        self._written: tuple[int, int] | None = None  # modification time and inode of job.json
        self._reported: Source | None = None
        # sizes of sequences, rows by expert
        self._others: dict[str, Source] = {}
        self._ranks: dict[str, Source] = {}
        self.last = -1  # the last step that all ranks have recorded

    def grow(self) -> bool:
        """Read new rows; return True if there is a further step that all ranks have recorded.

        Raises:
            SpecError: job.json cannot be read.
        """
        self._follow_start()
        if self._job is None or self._reported is None:
            return False
        self._reported.read()
        reported = self._reported.last
        if reported <= self.last:
            return False
        for folder in self._traces.glob("rank-*"):
            if folder.name not in self._ranks:
                self._ranks[folder.name] = self._source(folder.name, TRACE_COLUMNS)
        sources = [*self._others.values(), *self._ranks.values()]
        for source in sources:
            source.read()
        behind = min((one.last for one in self._ranks.values()), default=-1)
        last = behind if behind >= reported - MOST_BEHIND else reported
        grown, self.last = last > self.last, max(last, self.last)
        return grown

    def reached(self) -> tuple[object, int]:
        """Return the identity of the start that is read, and the last step that rank 0 reported."""
        self._follow_start()
        if self._reported is None:
            return None, -1
        self._reported.read()
        return self._written, self._reported.last

    def latest_s(self, steps: int) -> float | None:
        """Return the mean seconds of the last steps that rank 0 reported; None if too few."""
        self._follow_start()
        if self._reported is None:
            return None
        self._reported.read()
        last = self._reported.last
        rows = [row for table in self._reported.tables() for row in table.to_pylist()]
        seconds = [row["iteration_s"] for row in rows if row["step"] > last - steps]
        return None if len(seconds) < steps else sum(seconds) / steps

    @property
    def first(self) -> int:
        """First step that is held for all ranks."""
        sources = [one for one in (self._reported, *self._ranks.values()) if one is not None]
        return max([one.first for one in sources if one.last >= 0] + [self._first(self.last)])

    def files(self) -> TraceFiles:
        """Return the held rows, up to the last step, in the form that the analysis reads."""
        named = {
            "segments": list(self._ranks.values()),
            "steps": [self._reported] if self._reported else [],
        } | {name: [source] for name, source in self._others.items()}
        first = self._first(self.last)
        tables = {
            name: [table for one in sources for table in one.tables()]
            for name, sources in named.items()
        }
        return TraceFiles(
            job=self._job,
            open_segments={
                name: _steps(held, first, self.last) for name, held in tables.items() if held
            },
            warnings=[problem for one in self._ranks.values() for problem in one.problems],
        )

    def _first(self, last: int) -> int:
        return max(0, last - self._steps + 1)

    def _follow_start(self) -> None:
        """Reset if the job was started again."""
        path = self._traces / "job.json"
        try:
            about = path.stat()
        except OSError:
            return
        if self._written == (about.st_mtime_ns, about.st_ino):
            return
        try:
            self._job = read_job(path)
        except SpecError:
            if path.exists():
                raise
            return  # moved aside just now
        self._written, self.last = (about.st_mtime_ns, about.st_ino), -1
        self._reported = self._source("steps", TABLES["steps"])
        self._others = {name: self._source(name, TABLES[name]) for name in ("sizes", "experts")}
        self._ranks = {}

    def _source(self, folder: str, columns: dict[str, str]) -> Source:
        assert self._job is not None, "a start is followed first"
        return Source(self._traces / folder, columns, self._job.run, self._steps + MOST_BEHIND)


def _steps(tables: list[pa.Table], first: int, last: int) -> pa.Table:
    """Return the rows of the steps from `first` to `last`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = pa.concat_tables(tables, promote_options="default").combine_chunks()
    step = rows.column("step")
    return rows.filter(pc.and_(pc.greater_equal(step, first), pc.less_equal(step, last)))


@dataclass
class Source:
    """Segments of one folder, which one process writes.

    Args:
        folder: folder of the segments.
        columns: columns and their types.
        run: name of the start; segments of others are ignored.
        kept: number of steps that are held, up to the last one.
    """

    folder: Path
    columns: dict[str, str]
    run: str
    kept: int
    last: int = -1  # last step with rows
    problems: list[str] = field(default_factory=list)
    _whole: set[str] = field(default_factory=set)  # segments that are read completely
    _streams: dict[str, Stream] = field(default_factory=dict)
    _held: list[tuple[int, pa.Table]] = field(default_factory=list)  # by their last step

    def read(self) -> None:
        """Read new rows, the newest first, as far back as they are held."""
        found: dict[str, str] = {}
        for file in self.folder.glob(f"segment-{self.run}-*"):
            if file.suffix in (".parquet", OPEN_SEGMENT) and file.stem not in self._whole:
                found[file.stem] = max(file.suffix, found.get(file.stem, ""))
        for stem in sorted(found, reverse=True):
            if found[stem] == OPEN_SEGMENT:
                self._hold(self._streams.setdefault(stem, Stream()).more(self._file(stem)))
                continue
            known = self._streams.pop(stem, Stream()).rows
            rows = self._replaced(self._file(stem, ".parquet"), known)
            self._whole.add(stem)
            if rows is None:  # so are earlier segments
                self._whole.update(one for one in found if one < stem)
                break
            self._hold([rows])
        self._held = [one for one in self._held if one[0] > self.last - self.kept]

    def _hold(self, tables: list[pa.Table]) -> None:
        for table in tables:
            if not len(table):
                continue
            try:
                rows = fitted(table, self.columns)
            except ValueError as error:
                self._say(
                    f"{self.folder.name} {error}: it was written by another version; left out"
                )
                continue
            if len(rows):
                last = int(rows.column("step").to_numpy().max())
                self._held.append((last, rows))
                self.last = max(self.last, last)

    @property
    def first(self) -> int:
        """First step with held rows; 0 if there are none."""
        import pyarrow.compute as pc

        return min((pc.min(table.column("step")).as_py() for _, table in self._held), default=0)

    def tables(self) -> list[pa.Table]:
        """Return the held rows."""
        return [table for _, table in self._held]

    def _file(self, stem: str, ending: str = OPEN_SEGMENT) -> Path:
        return self.folder / f"{stem}{ending}"

    def _replaced(self, file: Path, known: int) -> pa.Table | None:
        """Return rows of a replaced segment beyond the known ones; None if all are too old."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            footer = pq.read_metadata(file)
            place = footer.schema.names.index("step")
            statistics = [
                footer.row_group(group).column(place).statistics
                for group in range(footer.num_row_groups)
            ]
            steps = [one.max for one in statistics if one is not None and isinstance(one.max, int)]
            old = len(steps) == len(statistics) and max(steps, default=-1) <= self.last - self.kept
            return None if old else pq.read_table(file).slice(known)
        except FileNotFoundError:  # deleted just now (train.keep_trace_steps)
            return None
        except (OSError, ValueError, pa.ArrowException) as error:
            self._say(f"{file.parent.name}/{file.name} cannot be read ({error}); left out")
            return pa.table({})

    def _say(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


@dataclass
class Stream:
    """Position in an open segment, up to which it was read."""

    rows: int = 0
    _offset: int = 0
    _schema: Any = None

    def more(self, file: Path) -> list[pa.Table]:
        """Return appended rows; an incomplete batch is read the next time."""
        import pyarrow as pa

        try:
            with file.open("rb") as opened:
                opened.seek(self._offset)
                source = pa.BufferReader(opened.read())
        except OSError:  # replaced just now
            return []
        tables = []
        while True:
            before = source.tell()
            try:
                message = pa.ipc.read_message(source)
                if message.type == "schema":
                    self._schema = pa.ipc.read_schema(message)
                else:
                    batch = pa.ipc.read_record_batch(message, self._schema)
                    tables.append(pa.Table.from_batches([batch]))
                    self.rows += len(batch)
            except (EOFError, OSError, TypeError, pa.ArrowException):
                return tables
            self._offset += source.tell() - before
