"""What every format's database shares: queries as `.sql` files, and one SELECT of a stranger answered safely."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.errors import UsageError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


@dataclass(frozen=True)
class Table:
    """What a query answered."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def connect(database: Path | str = ":memory:", read_only: bool = False, **settings: Any) -> DuckDBPyConnection:
    """A database that looks at no variables of Python and draws no progress bar, which DuckDB would on our stdout."""
    import duckdb

    connection = duckdb.connect(str(database), read_only=read_only,
                                config={"python_enable_replacements": False} | settings)
    connection.execute("SET enable_progress_bar = false")
    return connection


def answer(connection: DuckDBPyConnection, query: str, views: Iterable[str]) -> Table:
    """Answer one SELECT over the named views of a connection that can reach nothing else.

    Raises:
        UsageError: the query is not one SELECT statement, or DuckDB refuses it.
    """
    import duckdb

    known = "The views are: " + ", ".join(views)
    try:
        statements = connection.extract_statements(query)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise UsageError("--sql takes exactly one SELECT statement", f"given: {query}", known)
        cursor = connection.execute(statements[0])
        return Table([column[0] for column in cursor.description or []], cursor.fetchall())
    except duckdb.Error as error:
        raise UsageError("The query failed", str(error), known) from None


def query_text(name: str) -> str:
    """The text of `queries/NAME.sql`."""
    return (resources.files("disttrain_cli.analysis") / "queries" / f"{name}.sql").read_text(encoding="utf-8")


def header(text: str) -> str:
    """The leading comment of an SQL file as one line."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(lines)
