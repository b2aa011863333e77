"""DuckDB database with views over Parquet segments in place, and the plan and cost model as tables.

`seen` has the sums of one pass over the files by rank and step. If many queries follow, up to
`MOST_ROWS_HELD` rows are then held in memory as `known`; for a longer trace `known` is a view,
which reads the files in every query. Once the views exist, the connection may open no file but the
segments, load no extension and change no setting, so that `--sql` can run a user's query. Names of
files and strings of a trace reach SQL only as quoted literals or parameters.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.analysis.figures import agree, counted
from disttrain_cli.analysis.formats import RECORD
from disttrain_cli.analysis.job.clocks import repair_clocks
from disttrain_cli.analysis.job.costing import StageCost, known_stages, stage_costs
from disttrain_cli.analysis.job.files import Footer, TraceFiles, find_traces, first_damaged
from disttrain_cli.analysis.job.fitting import usable
from disttrain_cli.analysis.job.unpacking import TYPES, unpack
from disttrain_cli.analysis.result.rows import HostClock
from disttrain_cli.analysis.sql import connect, literals, lock, no_glob, query_text, rows_of
from disttrain_cli.analysis.views import ask_internal, inside, publish
from disttrain_cli.calls import call
from disttrain_cli.costs.layout import CostedStage
from disttrain_cli.errors import DataError
from disttrain_cli.spec.rundir import RunDir, run_folder
from disttrain_cli.spec.stage_graph import cuts_of
from disttrain_cli.spec.trace import TABLES, TRACE_COLUMNS, Job

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

#: Largest trace that is held in memory, in rows (about 200 bytes each).
MOST_ROWS_HELD = 5_000_000
#: Views of `queries/view_NAME.sql`, in the order of their dependencies.
_VIEWS = ("windows", "known", "operations", "idle", "memory", "messages", "samples")


@dataclass
class Database:
    """An open connection, the job with the stages of its layout, and warnings."""

    connection: DuckDBPyConnection
    # second connection to the same database, for the queries of `ask_ahead`
    asker: DuckDBPyConnection
    job: Job | None
    run: str
    name: str  # name of the run, or of its folder
    paths: list[Path]
    stages: list[CostedStage] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    clocks: list[HostClock] = field(default_factory=list)
    _asked: dict[str, Future[list[dict[str, Any]]]] = field(default_factory=dict)
    _answered: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    # one connection runs one query at a time
    _asking: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def ask_ahead(self, *names: str) -> None:
        """Run queries without parameters in the background; `query` waits for their results."""
        ask = partial(rows_of, self.asker)
        self._asked |= {name: self._asking.submit(ask, query_text(name)) for name in names}

    def query(self, name: str, **parameters: Any) -> list[dict[str, Any]]:
        """Return the rows of `queries/NAME.sql` with `$parameter` values; cached without any."""
        if parameters:
            return self.sql(query_text(name), parameters)
        if name not in self._answered:
            ahead = self._asked.pop(name, None)
            self._answered[name] = self.sql(query_text(name)) if ahead is None else ahead.result()
        return [dict(row) for row in self._answered[name]]

    def columns(self, name: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of `queries/NAME.sql` as NumPy columns, for long results."""
        return self.connection.execute(query_text(name), parameters or None).fetchnumpy()

    def close(self) -> None:
        """Close the connections and free the memory."""
        self._asking.shutdown(cancel_futures=True)
        self.asker.close()
        self.connection.close()

    def sql(self, text: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Run an SQL text of this package and return its rows."""
        return rows_of(self.connection, text, parameters)


def open_database(
    paths: list[Path],
    file: Path | None = None,
    strangers: bool = False,
    held: TraceFiles | None = None,
) -> Database:
    """Open the traces in `paths` as views; `queries/views.yaml` documents them.

    Args:
        paths: folders of traces, or one file of Chrome JSON.
        file: where to write a database that is opened again later, which holds no rows of the
            trace; None: in memory for many queries, with rows read once as far as they fit
            (`MOST_ROWS_HELD`).
        strangers: create the documented views, for users' queries; the caller still has to lock the
            connection.
        held: files and rows of these paths that were read already; nothing else is read then.

    Raises:
        DataError: a path does not exist, or nothing in it can be read.
    """
    import duckdb

    connection, files = connect(file or ":memory:"), None
    try:
        inside(connection)
        files = _make_sources(paths, connection) if held is None else _sourced(held, connection)
        run = _choose_starts(connection, files)
        clocks = repair_clocks(connection, files.warnings)
        stages = known_stages(files.job, files.warnings) if files.job is not None else []
        _make_layout(connection, files.job, stages)
        _make_cuts(connection, stages)
        connection.execute("SET preserve_insertion_order = false")  # lets several threads write
        # an unpacked file has its own table of windows, with the measured steps
        for view in _VIEWS if files.rows else _VIEWS[1:]:
            text = query_text(f"view_{view}")
            once = file is None and (
                view == "idle" or (view == "known" and files.rows <= MOST_ROWS_HELD)
            )
            connection.execute(text.replace("CREATE VIEW", "CREATE TABLE") if once else text)
        connection.execute("SET preserve_insertion_order = true")
        if strangers:
            publish(connection, "own", "losses")
        asker = connection.cursor()
        ask_internal(asker)
        connection.execute(f"SET allowed_paths = {literals(files.all, str, no_glob)}")
        if not strangers:
            lock(connection)
    except duckdb.Error as error:
        if files is not None and not all(file.exists() for file in files.all):
            raise DataError(
                "Segments of the trace were deleted while they were read",
                "train.keep_trace_steps deletes those of older steps during training",
                "Run the command again.",
            ) from None
        damaged = first_damaged(files.all) if files is not None else None
        raise DataError(
            "The trace cannot be read",
            str(error).splitlines()[0],
            f"Remove the damaged {'segment' if damaged is None else damaged}.",
        ) from None
    return Database(
        connection,
        asker,
        files.job,
        run,
        files.name or _name(paths[0]),
        paths,
        stages,
        files.warnings,
        clocks,
    )


def _name(path: Path) -> str:
    """Return the name of the run; for a rehearsal, that of the rehearsed run."""
    folder = (run_folder(path) or path).resolve()
    return folder.parent.name if RunDir(folder.parent).rehearsal.root == folder else folder.name


def _make_sources(paths: list[Path], connection: DuckDBPyConnection) -> TraceFiles:
    """Create views over segments, or tables of the rows in one file of Chrome JSON."""
    if any(path.is_file() for path in paths):
        if len(paths) > 1:
            raise DataError(
                "disttrain traces exported as Chrome JSON must be analysed by themselves",
                f"{len(paths)} paths were passed",
                call("analyze", paths[0]),
            )
        return unpack(paths[0], connection)
    return _sourced(find_traces(paths, connection), connection)


def _sourced(files: TraceFiles, connection: DuckDBPyConnection) -> TraceFiles:
    """Create views over segments and over the rows of open segments."""
    for name, columns in {"segments": TRACE_COLUMNS, **TABLES}.items():
        view = f"{name.removesuffix('s')}_segments" if name in TABLES else name
        rows, kept = files.open_segments.get(name), getattr(files, name)
        _make_source(connection, view, kept, rows, columns, usable(view))
    return files


def _make_source(
    connection: DuckDBPyConnection,
    name: str,
    files: dict[Path, Footer],
    rows: pa.Table | None,
    columns: dict[str, str],
    usable: str,
) -> None:
    """Create a view of the usable rows of Parquet files and a table, with the schema's columns.

    Without files and rows it is empty, with the same columns.
    """
    shape = ", ".join(f"{column} {TYPES[kind]}" for column, kind in columns.items())
    # for files with the same columns, reading one footer is enough
    alike: dict[frozenset[tuple[str, str]], list[Path]] = {}
    for file, footer in files.items():
        alike.setdefault(footer.columns, []).append(file)
    parts = [f"SELECT * FROM read_parquet({literals(group, no_glob)})" for group in alike.values()]
    if rows is not None:
        connection.register("given", rows)
        connection.execute(f"CREATE TABLE {name}_open AS SELECT * FROM given")
        connection.unregister("given")
        parts.append(f"SELECT * FROM {name}_open")
    if not parts:
        connection.execute(f"CREATE TABLE {name}_shape ({shape})")
        parts.append(f"SELECT * FROM {name}_shape")
    casts = ", ".join(
        f"TRY_CAST({column} AS {TYPES[kind]}) AS {column}" for column, kind in columns.items()
    )
    selected = f"SELECT {casts} FROM ({' UNION ALL BY NAME '.join(parts)})"
    connection.execute(f"CREATE VIEW {name} AS SELECT * FROM ({selected}) WHERE {usable}")


def _choose_starts(connection: DuckDBPyConnection, files: TraceFiles) -> str:
    """Create the views `recorded` and `steps` of the starts of one job; return the last start.

    A step repeated after resuming counts once, as last done. Every start of a job is a separate
    `run`. Starts whose ranks have other coordinates than the job's last start belong to another
    plan and are left out.
    """
    connection.execute(query_text("seen"))
    job, warnings = files.job, files.warnings
    starts = connection.execute(
        "SELECT run, list_sort(list(DISTINCT (unit, stage, replica, cp_rank, tp_rank,"
        " rank)::VARCHAR)) AS coords, min(first_ns) FROM seen GROUP BY run ORDER BY min(first_ns),"
        " run"
    ).fetchall()
    if not starts:
        raise DataError(
            "No row of the trace is usable",
            "coordinates or times of all rows are missing or impossible",
            RECORD,
        )
    seen = connection.execute("SELECT sum(rows)::BIGINT FROM seen").fetchall()[0][0]
    if unusable := max(0, files.recorded_rows - seen):
        warnings.append(
            f"{unusable:,} row(s) with missing or impossible coordinates or times are left out"
        )
    coords = {str(name): coords for name, coords, _ in starts}
    last = job.run if job is not None and job.run in coords else list(coords)[-1]
    if job is not None and job.run not in coords:
        warnings.append(
            f"job.json describes the start {job.run!r}, which wrote no rows; {last!r} is analysed"
        )
    most = math.inf if job is None else job.layout.gpus_used
    alike = [
        name
        for name in coords
        if set(coords[name]) <= set(coords[last])
        or (set(coords[last]) <= set(coords[name]) and len(coords[name]) <= most)
    ]
    others = [name for name in coords if name not in alike]
    if others:
        warnings.append(
            f"the traces mix starts with different plans: {last!r} is analysed,"
            f" {', '.join(map(repr, others))} left out"
        )
    known = "TRUE"
    if job is not None:
        units = [unit.name for unit in job.layout.units]
        known = f"list_contains({literals(units)}, unit)"
        foreign = connection.execute(
            f"DELETE FROM seen WHERE list_contains($runs, run) AND NOT {known} RETURNING unit",
            {"runs": alike},
        ).fetchall()
        if foreign:
            names = ", ".join(sorted({name for (name,) in foreign}))
            warnings.append(f"rows of {names}, which are not units of job.json, are left out")
    connection.execute(
        "CREATE TABLE kept AS SELECT step, arg_max(run, latest_ns) AS run, count(DISTINCT run) AS"
        " starts FROM seen WHERE list_contains($runs, run) GROUP BY step",
        {"runs": alike},
    )
    connection.execute(
        "CREATE VIEW recorded AS SELECT s.* REPLACE (coalesce(cp_rank, 0) AS cp_rank,"
        " coalesce(late_ns, 0) AS late_ns) FROM segments"
        " s" + (" JOIN kept USING (step, run)" if len(coords) > 1 else "") + f" WHERE {known}"
    )
    connection.execute(
        "CREATE VIEW steps AS SELECT s.* FROM step_segments s JOIN kept USING (step, run) "
        "QUALIFY row_number() OVER (PARTITION BY step ORDER BY end_ns DESC) = 1"
    )
    for view, segments in (("sizes", "size_segments"), ("experts", "expert_segments")):
        connection.execute(
            f"CREATE VIEW {view} AS SELECT s.* FROM {segments} s JOIN kept USING (step, run)"
        )
    repeated = connection.execute("SELECT count(*) FROM kept WHERE starts > 1").fetchall()[0][0]
    first, earlier = connection.execute(
        "SELECT first, (SELECT count(DISTINCT step) FROM step_segments WHERE NOT"
        " list_contains($others::VARCHAR[], run) AND step < first) FROM (SELECT min(step) AS first"
        " FROM kept)",
        {"others": others},
    ).fetchall()[0]
    if earlier:
        warnings.append(
            f"the traces begin at step {first:,}: those of {counted(earlier, 'earlier step')}"
            f" {agree(earlier, 'was', 'were')} deleted (train.keep_trace_steps)"
        )
    if repeated:
        warnings.append(
            f"{counted(repeated, 'step')} {agree(repeated, 'was', 'were')} repeated after resuming;"
            " the last repetition is analysed"
        )
    return last


def _make_cuts(connection: DuckDBPyConnection, stages: list[CostedStage]) -> None:
    """Create the table `cuts`: depths of the stages on both sides of every cut.

    Unknown stages are in one line.
    """
    connection.execute("CREATE TABLE cuts (before INTEGER, after INTEGER)")
    if len(stages) > 1:
        connection.executemany("INSERT INTO cuts VALUES (?, ?)", cuts_of(stages))
    elif not stages:
        connection.execute(
            "INSERT INTO cuts SELECT range, range + 1 FROM range(0, (SELECT sum(pp)::BIGINT FROM"
            " units) - 1)"
        )


def _make_layout(
    connection: DuckDBPyConnection, job: Job | None, stages: list[CostedStage]
) -> None:
    """Create the tables `units` (the plan or the trace's layout) and `costs` (by stage and module).

    Often only one of a replica's ranks on a stage is recorded: it then represents the devices of
    the others too.
    """
    connection.execute(
        "CREATE TABLE units (unit VARCHAR, place INTEGER, modules VARCHAR[], tp INTEGER, cp"
        " INTEGER, dp INTEGER, pp INTEGER, gpus INTEGER, first_depth INTEGER, devices_per_rank"
        " DOUBLE)"
    )
    connection.execute(
        "CREATE TABLE costs (unit VARCHAR, stage INTEGER, module VARCHAR, kind VARCHAR, operation"
        " VARCHAR, " + ", ".join(f"{name} DOUBLE" for name in StageCost._fields[5:]) + ")"
    )
    if job is None:
        connection.execute(query_text("layout_from_trace"))
        return
    recorded: dict[str, int] = dict(
        connection.execute(
            "SELECT unit, count(DISTINCT (cp_rank, tp_rank)) FROM seen JOIN kept USING (step, run)"
            " GROUP BY unit"
        ).fetchall()
    )
    depth = 0
    for index, unit in enumerate(job.layout.units):
        connection.execute(
            "INSERT INTO units VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                unit.name,
                index,
                unit.modules,
                unit.tp,
                unit.cp,
                unit.dp,
                unit.stages,
                unit.gpus,
                depth,
                unit.tp_cp_size / recorded.get(unit.name, 1),
            ],
        )
        depth += unit.stages
    rows = stage_costs(job, stages)
    if rows:
        connection.executemany(
            f"INSERT INTO costs VALUES ({', '.join('?' * len(StageCost._fields))})",
            [list(row) for row in rows],
        )
