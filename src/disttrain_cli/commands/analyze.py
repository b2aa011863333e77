"""`disttrain analyze`: what the traces say: the verdict first, then tables, the report page, and conditions."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disttrain_cli.commands.common import DEFAULT_RUN_FILE, JsonFlag, QuietFlag, open_run, percent, short_path
from disttrain_cli.console import Console, format_table
from disttrain_cli.errors import ConditionHoldsError
from disttrain_cli.spec.rundir import RunDir

if TYPE_CHECKING:
    from disttrain_cli.analysis.result import Analysis

MOST_OPERATIONS = 12  # rows shown; --json has all of them

EPILOG = """Examples:

$ disttrain analyze
$ disttrain analyze runs/tiny --html report.html
$ disttrain analyze --sql "SELECT operation, count(*) FROM trace GROUP BY ALL"
$ disttrain analyze runs/new --compare runs/old
$ disttrain analyze --fail-if "job.bubble_fraction > 0.3"

Exit code 5 means that a --fail-if condition holds.
"""


def run(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", show_default=False,
                       help="Run folders or trace folders; if none is given, the run of ./disttrain.yaml."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report page here instead of in the run's folder.")
    ] = None,
    sql: Annotated[
        str | None, typer.Option(metavar="QUERY", help="Answer one SELECT over the traces, and nothing else.")
    ] = None,
    compare: Annotated[Path | None, typer.Option(metavar="PATH", help="An earlier run to set beside this one.")] = None,
    fail_if: Annotated[
        str | None, typer.Option(metavar="EXPR", help="Exit with code 5 if this holds, such as job.mfu < 0.4")
    ] = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Explain a run from its traces."""
    console = Console(json_mode=json_mode, quiet=quiet)
    folders = paths or [open_run(DEFAULT_RUN_FILE).dir.root]
    if sql is not None:
        _answer(console, folders, sql)
        return
    from disttrain_cli.analysis.analyze import analyze, analyze_database
    from disttrain_cli.analysis.compare import compare as set_side_by_side
    from disttrain_cli.analysis.database import open_database
    from disttrain_cli.analysis.expressions import fail_if as raise_if_holds
    from disttrain_cli.analysis.expressions import holds
    from disttrain_cli.analysis.report import write_report

    database = open_database(folders)
    found = analyze_database(database)
    document: dict[str, Any] = found.to_json()
    root = _run_dir(folders[0])
    report = html or (root.report if root is not None else None)
    if report is not None:
        write_report(found, database, sorted(root.images.glob("*/*.png")) if root is not None else [], report)
        document["report"] = str(report)
    changes = set_side_by_side(analyze([compare]), found) if compare is not None else []
    if compare is not None:
        document["compare"] = {"with": str(compare), "changes": [change.model_dump() for change in changes]}
    if fail_if is not None:
        fails, sentence = holds(found, fail_if)
        document["fail_if"] = {"condition": fail_if, "holds": fails, "sentence": sentence}
    console.result(document, report or "")
    _render(console, found)
    console.table(f"Against {compare}", ["figure", "before", "after", "change"],
                  [[change.what, _figure(change.before), _figure(change.after),
                    "–" if change.change_pct is None else f"{change.change_pct:+.1f} %"] for change in changes])
    if report is not None:
        console.say(f"\nReport      {short_path(report)}")
    if fail_if is not None:
        if fails and json_mode:  # the document says it; a second one would not be JSON
            raise typer.Exit(ConditionHoldsError.exit_code)
        raise_if_holds(found, fail_if)
        console.note(sentence)
    console.hint(_with_paths(found.verdict.next_command, paths))


def _with_paths(command: str, paths: list[Path] | None) -> str:
    """The next command with the folders that were named, where it asks the same traces again."""
    again = "disttrain analyze "
    if not paths or not command.startswith(again):
        return command
    return f"{again}{shlex.join(map(str, paths))} {command.removeprefix(again)}"


def _run_dir(folder: Path) -> RunDir | None:
    """The run's folder, if that or the `traces` inside it was named."""
    if (folder / "traces").is_dir():
        return RunDir(folder)
    return RunDir(folder.parent) if folder.name == "traces" else None


def _answer(console: Console, folders: list[Path], query: str) -> None:
    from disttrain_cli.analysis.database import run_sql

    table = run_sql(folders, query)
    if console.json_mode:
        console.result({"columns": table.columns, "rows": [list(row) for row in table.rows]})
    else:
        print(format_table(table.columns, [[_figure(value) for value in row] for row in table.rows]))


def _render(console: Console, found: Analysis) -> None:
    verdict, job = found.verdict, found.job
    if job.rehearsed is not None:
        console.say(job.rehearsed)
    console.say(verdict.headline)
    place = ", ".join(f"{name} {value}" for name, value in verdict.place.model_dump().items() if value is not None)
    console.say(f"Where       {place}" if place else "Where       the whole job")
    console.say(f"Confidence  {percent(verdict.confidence)}")
    console.say(f"Advice      {verdict.advice}")
    console.table("Evidence", ["what", "value", "unit"],
                  [[row.what, _figure(row.value), row.unit] for row in verdict.evidence])
    console.say(f"\nJob         {job.layout}")
    console.say(f"            {job.steps_measured} of {job.steps} steps measured: {job.iteration_s:.3f} s per step, "
                f"MFU {percent(job.mfu)}, bubble {percent(job.bubble_fraction)}, "
                f"exposed communication {percent(job.exposed_communication_fraction)}")
    console.table(
        "Units; seconds per step and rank",
        ["unit", "devices", "DP", "PP", "MFU", "busy", "compute s", "data wait s", "warm-up and drain s",
         "other unit s", "other stage s", "transfer s", "update s", "gap s"],
        [[unit.name, unit.gpus, unit.dp, unit.pp, percent(unit.mfu), percent(unit.busy_fraction),
          *(f"{value:.3f}" for value in (unit.compute_s, unit.data_wait_s, unit.warmup_drain_s, unit.other_unit_s,
                                         unit.other_stage_s, unit.transfer_s, unit.update_s, unit.gap_s))]
         for unit in found.units])
    lost = found.stragglers
    if lost.lost_s is not None:
        console.table(f"Lost per step ({lost.slowdown:.3f} × the ideal of {lost.ideal_s:.3f} s)",
                      ["cause", "s"], [[cause, f"{seconds:.4f}"] for cause, seconds in lost.lost_s.items()])
    console.table("Slowest, beside the mean of its kind", ["what", "ms", "time", "time for its work"],
                  [[f"{row.kind} {row.number}" + (f" of {row.unit}" if row.unit else ""), f"{row.mean_ms:.1f}",
                    f"{row.ratio:.2f} ×", "–" if row.normalised_ratio is None else f"{row.normalised_ratio:.2f} ×"]
                   for row in found.slowest])
    if found.warnings:
        console.say("\nWarnings")
    for warning in found.warnings:
        console.say(f"- {warning}")
    console.table("Predicted against measured (the report has more)",
                  ["what", "unit", "basis", "predicted", "measured", "in", "error"],
                  [[row.what, row.unit or "job", row.basis, _figure(row.predicted), _figure(row.measured),
                    row.measure, f"{row.error_pct:+.1f} %"]
                   for row in found.predicted_vs_measured if row.unit is None])
    console.table(
        "By operation in ms, the largest error in a step first",
        ["where", "operation", "plan", "profile, same work", "measured", "error", "per step", "adds ms", "of the step"],
        [[row.place, row.operation, _figure(row.planned), _figure(row.predicted), _figure(row.measured),
          "–" if row.error_pct is None else f"{row.error_pct:+.1f} %", f"{row.per_step:.3g}", f"{row.effect_ms:+.3f}",
          percent(row.share_of_step)] for row in found.operations[1:1 + MOST_OPERATIONS]])


def _figure(value: Any) -> str:
    """A number with the digits that matter; anything else as it is."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
