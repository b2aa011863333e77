"""What every format's database shares: queries as `.sql` files, and one SELECT of a stranger
answered safely."""

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

#: Rows of an answer to a stranger; more would fill the memory, and nobody reads them.
MOST_ANSWERED = 1_000_000


@dataclass(frozen=True)
class Table:
    """What a query answered."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def connect(
    database: Path | str = ":memory:", read_only: bool = False, **settings: Any
) -> DuckDBPyConnection:
    """A database that looks at no variables of Python and draws no progress bar, which DuckDB would
    on our stdout."""
    import duckdb

    connection = duckdb.connect(
        str(database), read_only=read_only, config={"python_enable_replacements": False} | settings
    )
    connection.execute("SET enable_progress_bar = false")
    return connection


def open_cached(
    inputs: list[Path], version: str, build: Callable[[Path], None]
) -> DuckDBPyConnection:
    """A read-only connection to the database that `build` makes of `inputs`, now or before (see
    `cache.cached`).

    A damaged database of the cache is built once more; one that does not stay goes with the
    connection.

    Raises:
        DataError: what `build` raises, or the database cannot be written.
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
    """From now on it opens no further file, loads no extension and keeps its settings."""
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def answer(
    connection: DuckDBPyConnection,
    query: str,
    views: Callable[[], Iterable[str]],
    fetch: Callable[[DuckDBPyConnection, Statement], Answer],
) -> Answer:
    """Answer one SELECT over views, which `views` names, of a connection that can reach nothing
    else, as `fetch` (`rows`, `arrow`) takes it.

    Raises:
        UsageError: the query is not one SELECT statement, or DuckDB refuses it.
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
    """An answer as rows; UsageError where there are more than `MOST_ANSWERED`."""
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
    """An answer as an Arrow table, however long."""
    return connection.sql(statement).to_arrow_table()


def _interruptible(
    connection: DuckDBPyConnection,
    statement: Statement,
    fetch: Callable[[DuckDBPyConnection, Statement], Answer],
) -> Answer:
    """What a statement answers; Ctrl-C ends it, which DuckDB alone does not heed in every query."""

    answered: Future[Answer] = Future()

    def run() -> None:
        try:
            answered.set_result(fetch(connection, statement))
        except BaseException as error:  # for whoever asked
            answered.set_exception(error)

    thread = Thread(target=run, daemon=True)
    try:
        thread.start()
        return answered.result()
    except KeyboardInterrupt:
        # again and again: a query that has yet to begin does not hear of it
        while thread.is_alive():
            connection.interrupt()
            thread.join(0.1)
        raise


def _known(views: Iterable[str]) -> str:
    return "The views are: " + ", ".join([*views, "columns (what their columns mean)"])


def rows_of(
    connection: DuckDBPyConnection, text: str, parameters: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Rows of an SQL text of ours, by the names of its columns."""
    cursor = connection.execute(text, parameters or None)
    names = [column[0] for column in cursor.description or []]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def query_text(name: str) -> str:
    """The text of `queries/NAME.sql`."""
    return (resources.files("disttrain_cli.analysis") / "queries" / f"{name}.sql").read_text(
        encoding="utf-8"
    )


def literals(names: Iterable[Path | str], *forms: Callable[[str], str]) -> str:
    """A SQL list of quoted names, each in every given form (as it is without one)."""
    written = [form(str(name)) for name in names for form in forms or (str,)]
    return "[" + ", ".join("'" + name.replace("'", "''") + "'" for name in written) + "]"


def no_glob(name: str) -> str:
    """The name with the characters that DuckDB would expand standing for themselves."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
