"""Access to the databases of all formats: `.sql` queries, and one safe SELECT of the user."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from disttrain_cli.analysis.cache import cached, forget
from disttrain_cli.calls import argument
from disttrain_cli.errors import DataError, UsageError

if TYPE_CHECKING:
    import pyarrow
    from duckdb import DuckDBPyConnection, Statement

Answer = TypeVar("Answer")

#: Most rows of the answer to a user's query: more would fill the memory, and would not be read.
MOST_ANSWERED = 1_000_000


@dataclass(frozen=True)
class Table:
    """Columns and rows of a query's result."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def connect(
    database: Path | str = ":memory:", read_only: bool = False, **settings: Any
) -> DuckDBPyConnection:
    """Open a database without access to Python variables and without DuckDB's progress bar.

    The progress bar would be drawn on stdout.
    """
    import duckdb

    connection = duckdb.connect(
        str(database), read_only=read_only, config={"python_enable_replacements": False} | settings
    )
    connection.execute("SET enable_progress_bar = false")
    return connection


def open_cached(
    inputs: list[Path], version: str, build: Callable[[Path], None]
) -> DuckDBPyConnection:
    """Return a read-only connection to the database built from `inputs` (see `cache.cached`).

    A damaged database in the cache is built once more; one that does not stay in the cache is
    removed with the connection.

    Raises:
        DataError: `build` raised it, or the database cannot be written.
    """
    import duckdb

    try:
        path, stays = cached(inputs, version, build)
        try:
            connection = connect(path, read_only=True)
        except duckdb.Error:
            path.unlink()
            path, stays = cached(inputs, version, build)
            connection = connect(path, read_only=True)
    except duckdb.Error as error:
        raise DataError(
            "The traces cannot be analysed",
            str(error).splitlines()[0],
            "Free some disk space or memory and run the command again.",
        ) from None
    if not stays:
        weakref.finalize(connection, forget, path)
    return connection


def lock(connection: DuckDBPyConnection) -> None:
    """Forbid the connection to open further files, load extensions or change settings."""
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def answer(
    connection: DuckDBPyConnection,
    query: str,
    views: Callable[[], Iterable[str]],
    fetch: Callable[[DuckDBPyConnection, Statement], Answer],
) -> Answer:
    """Run one SELECT on a connection that can reach nothing but the documented views.

    Args:
        connection: restricted to the views (`lock`).
        query: the user's text.
        views: returns the names of the views, for error messages.
        fetch: takes the answer (`rows`, `arrow`).

    Raises:
        UsageError: the query is not one SELECT statement, or DuckDB refuses it, or it returns more
            than `MOST_ANSWERED` rows.
    """
    import duckdb

    try:
        statements = connection.extract_statements(query)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise UsageError(
                f"{argument('query')} takes exactly one SELECT statement",
                f"given: {query}",
                _known(views()),
            )
        return _interruptible(connection, statements[0], fetch)
    except duckdb.Error as error:
        said = "\n".join(line for line in str(error).splitlines() if "internal." not in line)
        raise UsageError("The query failed", said, _known(views())) from None


def rows(connection: DuckDBPyConnection, statement: Statement) -> Table:
    """Return an answer as rows; UsageError where there are more than `MOST_ANSWERED`."""
    cursor = connection.execute(statement)
    table = Table(
        [column[0] for column in cursor.description or []], cursor.fetchmany(MOST_ANSWERED + 1)
    )
    if len(table.rows) > MOST_ANSWERED:
        raise UsageError(
            "The answer is too long",
            f"it has more than {MOST_ANSWERED:,} rows",
            "Ask for sums (GROUP BY ALL), or end the query with LIMIT.",
        )
    return table


def arrow(connection: DuckDBPyConnection, statement: Statement) -> pyarrow.Table:
    """Return a complete answer as an Arrow table."""
    return connection.sql(statement).to_arrow_table()


def _interruptible(
    connection: DuckDBPyConnection,
    statement: Statement,
    fetch: Callable[[DuckDBPyConnection, Statement], Answer],
) -> Answer:
    """Run a statement and return its answer; Ctrl-C interrupts it.

    DuckDB alone does not react to Ctrl-C in every query.
    """

    answered: Future[Answer] = Future()

    def run() -> None:
        try:
            answered.set_result(fetch(connection, statement))
        except BaseException as error:  # raised again by the caller
            answered.set_exception(error)

    thread = Thread(target=run, daemon=True)
    try:
        thread.start()
        return answered.result()
    except KeyboardInterrupt:
        # repeatedly: a query that has not started yet ignores an interrupt
        while thread.is_alive():
            connection.interrupt()
            thread.join(0.1)
        raise


def _known(views: Iterable[str]) -> str:
    return "The views are: " + ", ".join([*views, "columns (what their columns mean)"])


def rows_of(
    connection: DuckDBPyConnection, text: str, parameters: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Run an SQL text of this package and return its rows by the names of the columns."""
    cursor = connection.execute(text, parameters or None)
    names = [column[0] for column in cursor.description or []]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def query_text(name: str) -> str:
    """Return the text of `queries/NAME.sql`."""
    return (resources.files("disttrain_cli.analysis") / "queries" / f"{name}.sql").read_text(
        encoding="utf-8"
    )


def literals(names: Iterable[Path | str], *forms: Callable[[str], str]) -> str:
    """Return an SQL list of quoted names, each in all `forms` (unchanged if there are none)."""
    written = [form(str(name)) for name in names for form in forms or (str,)]
    return "[" + ", ".join("'" + name.replace("'", "''") + "'" for name in written) + "]"


def no_glob(name: str) -> str:
    """Escape the characters that DuckDB would expand in a file name."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
