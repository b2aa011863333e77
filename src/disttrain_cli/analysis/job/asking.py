"""`--sql` over disttrain's traces: one SELECT of the user, on a database that is prepared once.

The prepared state (which rows count, windows, clocks, the layout) is a DuckDB file in the user's
cache folder. It holds no rows of the trace: its views read the segments in place, the only files
that a query can reach.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.analysis.cache import program
from disttrain_cli.analysis.formats import files_of
from disttrain_cli.analysis.result.summary import Analysis
from disttrain_cli.analysis.sql import literals, lock, no_glob, open_cached
from disttrain_cli.analysis.views import ask_published
from disttrain_cli.errors import DataError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

#: The view whose rows come from the analysis: created for queries that name it.
_LOSSES = re.compile(r"\blosses\b", re.IGNORECASE)


def open_for(
    query: str, paths: list[Path], analyze: Callable[[list[Path]], Analysis]
) -> DuckDBPyConnection:
    """A connection that answers this query over the views: it can reach no file but the trace.

    Args:
        paths: folders of traces, or one file of Chrome JSON.
        query: the user's text.
        analyze: analyses `paths`; called if the query names the view `losses`.

    Raises:
        DataError: nothing can be read in `paths`.
    """
    connection = _open(paths)
    if _LOSSES.search(query):
        _make_losses(connection, analyze(paths))
    lock(connection)
    return connection


def _open(paths: list[Path]) -> DuckDBPyConnection:
    files = files_of("disttrain", paths)
    # Chrome JSON: its rows are in no segments that views could read in place
    if paths[0].is_file():
        return _in_memory(paths)
    try:
        connection = open_cached(
            files,
            f"own {[str(path.resolve()) for path in paths]} {program()}",
            lambda file: _prepare(paths, file),
        )
    # in memory if the cache's disk is full; errors of the traces are raised again
    except DataError:
        return _in_memory(paths)
    connection.execute(f"SET allowed_paths = {literals(files, str, no_glob)}")
    ask_published(connection)
    return connection


def _in_memory(paths: list[Path]) -> DuckDBPyConnection:
    from disttrain_cli.analysis.job.database import open_database

    connection = open_database(paths, strangers=True).connection
    ask_published(connection)
    return connection


def _prepare(paths: list[Path], file: Path) -> None:
    from disttrain_cli.analysis.job.database import open_database

    database = open_database(paths, file, strangers=True)
    database.asker.close()
    with database.connection as connection:
        # closing does this too, but silently ignores errors
        connection.execute("CHECKPOINT")


def _make_losses(connection: DuckDBPyConnection, analysis: Analysis) -> None:
    """Create the table of the seconds that every replayed step lost to each cause."""
    connection.execute(
        "CREATE TEMP TABLE losses (step INTEGER, cause VARCHAR, lost_s DOUBLE, ideal_s DOUBLE,"
        " step_s DOUBLE)"
    )
    rows = [
        [one.step, cause, seconds, one.ideal_s, one.step_s]
        for one in analysis.stragglers.by_step
        for cause, seconds in one.lost_s.items()
    ]
    if rows:
        connection.executemany("INSERT INTO losses VALUES (?, ?, ?, ?, ?)", rows)
