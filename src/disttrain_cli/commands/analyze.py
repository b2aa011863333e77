"""`disttrain analyze`: verdict on a job's traces, tables, report page and conditions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from disttrain_cli.analysis.figures import counted
from disttrain_cli.api import analyze, holds, open_run, write_perfetto
from disttrain_cli.api.analysing import folder_of
from disttrain_cli.commands.analyze_tables import render
from disttrain_cli.commands.common import JsonFlag, QuietFlag
from disttrain_cli.commands.compare_tables import show_comparison
from disttrain_cli.commands.device_tables import figure
from disttrain_cli.commands.flight_tables import are_dumps, show_dumps
from disttrain_cli.console import Console
from disttrain_cli.errors import ConditionHoldsError, UsageError
from disttrain_cli.naming import short_path

EPILOG = """Examples:

$ disttrain analyze
$ disttrain analyze runs/tiny --html report.html
$ disttrain analyze --sql "SELECT operation, count(*) FROM trace GROUP BY ALL"
$ disttrain analyze kineto_traces/ --html report.html
$ disttrain analyze runs/new --compare runs/old
$ disttrain analyze runs/tiny/logs/flight-recorder
$ disttrain analyze --perfetto trace.json.gz
$ disttrain analyze --fail-if "job.bubble_fraction > 30 % or verdict.cause == data"

Exit code 5 means that a --fail-if condition holds.
"""


def run(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH",
            show_default=False,
            help="Run folders, folders with a disttrain.yaml, trace folders, traces of any PyTorch"
            " job (Kineto/Chrome JSON, or .gz; also files written by --perfetto), or dumps of"
            " PyTorch's flight recorder; by default the run of ./disttrain.yaml.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the report page to this file instead of the run's folder."
        ),
    ] = None,
    sql: Annotated[
        str | None, typer.Option(metavar="QUERY", help="Only run one SELECT over the traces.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Only export disttrain traces as Chrome JSON for ui.perfetto.dev (compressed if"
            " the name ends in .gz).",
        ),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="PATH", help="An earlier run to compare this one with.")
    ] = None,
    fail_if: Annotated[
        str | None,
        typer.Option(
            metavar="EXPR",
            help="Exit with code 5 if this condition holds: comparisons of figures and texts of"
            " --json, joined by and, or, not.",
        ),
    ] = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Explain a run from its traces."""
    console = Console(json_mode=json_mode, quiet=quiet)
    _only_one(
        {"--sql": sql, "--perfetto": perfetto},
        {"--html": html, "--compare": compare, "--fail-if": fail_if},
    )
    paths = [_run_of(console, path) for path in paths or ()]
    if paths and are_dumps(paths):
        _no_traces({"--html": html, "--sql": sql, "--perfetto": perfetto, "--compare": compare})
        _no_traces({"--fail-if": fail_if})
        show_dumps(console, paths)
        return
    if sql is not None:
        _answer(console, paths or [open_run().dir.root], sql)
        return
    if perfetto is not None:
        _export(console, paths, perfetto)
        return
    from msgspec import to_builtins
    from msgspec.structs import asdict

    from disttrain_cli.analysis.expressions import fail_if as raise_if_holds

    with console.progress() as progress:
        result = analyze(*paths, html=html, compare=compare, progress=progress)
    analysis, report = result.analysis, result.report
    document: dict[str, Any] = analysis.to_json()
    if report is not None:
        document["report"] = str(report)
    if compare is not None:
        document["compare"] = {
            "with": str(compare),
            "changes": [asdict(row) for row in result.changes],
            "times": to_builtins(result.times),
        }
    if fail_if is not None:
        fails, sentence = holds(analysis, fail_if)
        document["fail_if"] = {"condition": fail_if, "holds": fails, "sentence": sentence}
    console.result(document, report or "")
    render(console, analysis)
    if compare is not None:
        show_comparison(console, compare, result.changes, result.times)
    if report is not None:
        console.say(f"\nReport      {short_path(report)}")
    if fail_if is not None:
        if fails and json_mode:  # the document holds it; a second document would not be JSON
            raise typer.Exit(ConditionHoldsError.exit_code)
        raise_if_holds(analysis, fail_if)
        console.note(sentence)
    console.hint(analysis.verdict.next_command)


def _run_of(console: Console, path: Path) -> Path:
    """Return the folder of traces for a path, with a note where a run file leads elsewhere."""
    folder = folder_of(path)
    if folder != path:
        console.note(
            f"{short_path(path)} has a run file: its run is analysed, of {short_path(folder)}."
        )
    return folder


def _only_one(alone: dict[str, object], others: dict[str, object]) -> None:
    """Refuse options that an exclusive option would silently ignore.

    Args:
        alone: exclusive options, which do nothing else.
        others: all other options.

    Raises:
        UsageError: an exclusive option is combined with another option.
    """
    options = [name for name, value in (alone | others).items() if value is not None]
    if len(options) > 1 and options[0] in alone:
        raise UsageError(
            f"{options[0]} does nothing else, so {' and '.join(options[1:])} would have no effect",
            f"given: {' '.join(options)}",
            f"Run disttrain analyze twice: with {options[0]}, and without",
        )


def _no_traces(options: dict[str, object]) -> None:
    """Raise UsageError if an option was given that does not apply to flight-recorder dumps."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(
                f"{name} needs traces, and these are dumps of PyTorch's flight recorder",
                "they show why a job hangs, but contain no times",
                f"Remove {name}.",
            )


def _export(console: Console, paths: list[Path], file: Path) -> None:
    from dataclasses import asdict

    with console.progress() as progress:
        written = write_perfetto(*paths, file=file, progress=progress)
    console.result(asdict(written), written.path)
    console.say(
        f"{written.events:,} events of steps {written.steps[0]} to {written.steps[-1]} "
        f"({counted(len(written.steps), 'step')}, {written.steps_left_out} left out) in"
        f" {short_path(file)}"
    )
    console.say(
        "Open it in https://ui.perfetto.dev or chrome://tracing; times are µs after"
        " baseTimeNanoseconds."
    )


def _answer(console: Console, folders: list[Path], query: str) -> None:
    from disttrain_cli.analysis.analyze import ask

    with console.progress() as progress:
        table = ask(folders, query, progress)
    if console.json_mode:
        console.result({"columns": table.columns, "rows": [list(row) for row in table.rows]})
    else:
        console.answer(table.columns, [[figure(value) for value in row] for row in table.rows])
