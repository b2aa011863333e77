"""`--sql` over own traces: one SELECT of a stranger, answered from a database that is prepared once.

What is prepared (which rows count, windows, clocks, the layout) is kept as a DuckDB file in the user's cache folder. It
holds no rows of the trace: its views read the segments in place, the only files that a query can reach.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.analysis.cache import program
from disttrain_cli.analysis.formats import files_of
from disttrain_cli.analysis.sql import Table, answer, literals, lock, no_glob, open_cached
from disttrain_cli.errors import DataError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def run_sql(paths: list[Path], query: str) -> Table:
    """Answer one SELECT over the views; read-only, and no file but the trace can be reached.

    Raises:
        DataError: nothing can be read in `paths`.
        UsageError: the query is not one SELECT statement, or DuckDB refuses it.
    """
    with _open(paths) as connection:
        return answer(connection, query, _views)


def _open(paths: list[Path]) -> DuckDBPyConnection:
    files = files_of("disttrain", paths)
    if paths[0].is_file():  # Chrome JSON of own traces: its rows are in no segments that views could read in place
        from disttrain_cli.analysis.own.database import open_database

        return open_database(paths).connection
    try:
        connection = open_cached(files, f"own {[str(path.resolve()) for path in paths]} {program()}",
                                 lambda file: _prepare(paths, file))
    except DataError:  # where only the cache's disk is full, memory does; what is wrong with traces is told once more
        from disttrain_cli.analysis.own.database import open_database

        return open_database(paths).connection
    connection.execute(f"SET allowed_paths = {literals(files, str, no_glob)}")
    lock(connection)
    return connection


def _prepare(paths: list[Path], file: Path) -> None:
    from disttrain_cli.analysis.own.database import open_database

    with open_database(paths, file).connection as connection:
        connection.execute("CHECKPOINT")  # closing would do it too, but says nothing where that fails


def _views() -> Iterable[str]:
    from disttrain_cli.analysis.own.database import documented_views

    return documented_views()
