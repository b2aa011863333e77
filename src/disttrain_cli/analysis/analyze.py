"""From traces to an `Analysis`: find out what they are and hand them to the reader of that format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.analysis.formats import find_format
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from disttrain_cli.analysis.own.database import Database
    from disttrain_cli.analysis.report.pictures import Pictures
    from disttrain_cli.analysis.result import Analysis
    from disttrain_cli.analysis.sql import Table


def analyze(paths: list[Path], progress: Progress = silent) -> Analysis:
    """Analyse the traces of one job, whatever wrote them.

    Args:
        paths: a run's folder or its `traces` folder; Kineto/Chrome JSON files (or .gz) or a folder of them; Parquet
            files of operations. Several are parts of one trace.
        progress: called on long reads.

    Raises:
        DataError: a path does not exist, nothing in it can be read, or the paths are of different formats.
    """
    return analyze_open(paths, progress)[0]


def analyze_open(paths: list[Path], progress: Progress = silent) -> tuple[Analysis, Callable[[], Pictures]]:
    """The same, and what draws the report's pictures from the same traces, should a report be wanted."""
    found, files = find_format(paths)
    if found == "kineto":
        from disttrain_cli.analysis.kineto.analysis import analyze_kineto_database
        from disttrain_cli.analysis.kineto.database import open_kineto

        traces = open_kineto(files, progress)
        judged = analyze_kineto_database(traces)

        def drawn() -> Pictures:
            from disttrain_cli.analysis.report.pictures import kineto_pictures

            return kineto_pictures(traces, judged.verdict.place.rank)

        return judged, drawn
    if found == "operations":
        from disttrain_cli.analysis.study import analyze_study

        return analyze_study(files), _no_pictures
    from disttrain_cli.analysis.own.remembered import analyze_run

    analysis, pictures = analyze_run(paths)
    return analysis, lambda: pictures


def analyze_database(database: Database) -> Analysis:
    """The same for own traces that are open already."""
    from disttrain_cli.analysis.own.analysis import analyze_database as analyze_own

    return analyze_own(database)


def ask(paths: list[Path], query: str, progress: Progress = silent) -> Table:
    """Answer one SELECT over the documented views of the traces, read-only.

    Raises:
        DataError: as `analyze`.
        UsageError: the query is not one SELECT statement, or DuckDB refuses it.
    """
    found, files = find_format(paths)
    if found == "kineto":
        from disttrain_cli.analysis.kineto.database import run_kineto_sql

        return run_kineto_sql(files, query, progress)
    if found == "operations":
        from disttrain_cli.analysis.study import run_study_sql

        return run_study_sql(files, query)
    from disttrain_cli.analysis.own.database import run_sql

    return run_sql(paths, query)


def _no_pictures() -> Pictures:
    from disttrain_cli.analysis.report.pictures import Pictures

    return Pictures()
