"""`--sql` over own traces: one SELECT of a stranger, answered from a database that is prepared once.

What is prepared (which rows count, windows, clocks, the layout) is kept as a DuckDB file in the user's cache folder. It
holds no rows of the trace: its views read the segments in place, the only files that a query can reach.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from disttrain_cli.analysis.cache import program
from disttrain_cli.analysis.formats import files_of
from disttrain_cli.analysis.sql import Table, answer, literals, lock, no_glob, open_cached


def run_sql(paths: list[Path], query: str) -> Table:
    """Answer one SELECT over the views; read-only, and no file but the trace can be reached.

    Raises:
        DataError: nothing can be read in `paths`.
        UsageError: the query is not one SELECT statement, or DuckDB refuses it.
    """
    files = files_of("disttrain", paths)
    connection = open_cached(files, f"own {[str(path.resolve()) for path in paths]} {program()}",
                             lambda file: _prepare(paths, file))
    with connection:
        connection.execute(f"SET allowed_paths = {literals(files, str, no_glob)}")
        lock(connection)
        return answer(connection, query, _views)


def _prepare(paths: list[Path], file: Path) -> None:
    from disttrain_cli.analysis.own.database import open_database

    open_database(paths, file).connection.close()


def _views() -> Iterable[str]:
    from disttrain_cli.analysis.own.database import documented_views

    return documented_views()
