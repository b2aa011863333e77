"""Entry point of the analysis: detect the traces' format and call the reader of that format."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from disttrain_cli.analysis.cache import cached_result
from disttrain_cli.analysis.formats import Format, Traces, files_of, find_format
from disttrain_cli.analysis.result.summary import Analysis
from disttrain_cli.analysis.sql import Answer, Table, answer, rows
from disttrain_cli.analysis.views import documented_views, explain
from disttrain_cli.calls import call
from disttrain_cli.errors import DataError
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, Statement

    from disttrain_cli.analysis.job.database import Database
    from disttrain_cli.analysis.report.pictures import Pictures


def analyze(paths: list[Path], progress: Progress = silent) -> Analysis:
    """Analyse the traces of one job, whatever wrote them.

    Args:
        paths: a run's folder or its `traces` folder; Kineto/Chrome JSON files (or .gz) or a folder
            of them; Parquet files of operations. Several are parts of one trace.
        progress: called on long reads.

    Raises:
        DataError: a path does not exist, nothing in it can be read, or the paths are of different
            formats.
    """
    return analyze_open(paths, progress)[0]


def analyze_open(
    paths: list[Path], progress: Progress = silent
) -> tuple[Analysis, Callable[[], Pictures]]:
    """Return the analysis and a function that draws the report's pictures of the same traces.

    The traces are opened at most once, and not at all if both results are cached.
    """
    trace_format, files, left_out = _traces(paths)
    inputs = files_of(trace_format, files)
    named = f"{trace_format} {[str(path) for path in paths]}"
    # opened at most once, and not at all if both results are cached
    traces = cache(lambda: _open(trace_format, files, progress))
    analysis = cached_result(
        inputs, f"analysis {named}", Analysis, lambda: _judge(trace_format, traces())
    )
    if left_out:
        analysis = replace(analysis, warnings=[*left_out, *analysis.warnings])

    def drawn() -> Pictures:
        from disttrain_cli.analysis.report.pictures import Pictures

        return cached_result(
            inputs,
            f"pictures {named}",
            Pictures,
            lambda: _draw(trace_format, traces(), analysis.verdict.place.rank),
        )

    return analysis, drawn


def _traces(paths: list[Path]) -> Traces:
    """Return the traces in the paths; raise DataError for dumps of the flight recorder."""
    found = find_format(paths)
    if found.format == "flight recorder":
        raise DataError(
            "These are dumps of PyTorch's flight recorder, not traces",
            "they show why a job hangs, but contain no times",
            f"To have them explained, run: {call('explain_hang', *paths)}",
        )
    return found


def _open(trace_format: Format, files: list[Path], progress: Progress) -> Any:
    """Open the traces with the reader of their format."""
    if trace_format == "kineto":
        from disttrain_cli.analysis.kineto.database import open_kineto

        return open_kineto(files, progress)
    if trace_format == "operations":
        return files
    from disttrain_cli.analysis.job.database import open_database

    return open_database(files)


def _judge(trace_format: Format, traces: Any) -> Analysis:
    if trace_format == "kineto":
        from disttrain_cli.analysis.kineto.analysis import analyze_kineto_database

        return analyze_kineto_database(traces)
    if trace_format == "operations":
        from disttrain_cli.analysis.study import analyze_study

        return analyze_study(traces)
    return analyze_database(traces)


def _draw(trace_format: Format, traces: Any, rank: int | None) -> Pictures:
    """Draw pictures that include the rank that the verdict names."""
    from disttrain_cli.analysis.report.pictures import kineto_pictures, pictures_of

    if trace_format == "kineto":
        return kineto_pictures(traces, rank)
    if trace_format == "operations":
        from disttrain_cli.analysis.study.drawing import study_pictures

        return study_pictures(traces, rank)
    return pictures_of(traces, rank)


def analyze_database(database: Database) -> Analysis:
    """Analyse an open database of disttrain's own traces."""
    from disttrain_cli.analysis.job.analysis import analyze_database as analyze_own

    return analyze_own(database)


def ask(paths: list[Path], query: str, progress: Progress = silent) -> Table:
    """Run one SELECT over the documented views of the traces, read-only.

    Raises:
        As `ask_for`; UsageError also where the answer has more rows than `sql.MOST_ANSWERED`.
    """
    return ask_for(rows, paths, query, progress)


def ask_for(
    fetch: Callable[[DuckDBPyConnection, Statement], Answer],
    paths: list[Path],
    query: str,
    progress: Progress = silent,
) -> Answer:
    """Answer a query as `ask` does, in the form that `fetch` takes from the connection.

    Raises:
        DataError: as `analyze`.
        UsageError: the query is not one SELECT statement, or DuckDB refuses it.
    """
    trace_format, files, _ = _traces(paths)
    views = "own"
    if trace_format == "kineto":
        from disttrain_cli.analysis.kineto.database import open_kineto

        views, connection = "kineto", open_kineto(files, progress, strangers=True).connection
    elif trace_format == "operations":
        from disttrain_cli.analysis.study import open_study

        views, connection = "study", open_study(files)[0]
        explain(connection, "study")
    else:
        from disttrain_cli.analysis.job.asking import open_for

        connection = open_for(query, files, analyze)
    with connection:
        return answer(connection, query, partial(documented_views, views), fetch)
