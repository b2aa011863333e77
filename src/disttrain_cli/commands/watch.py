"""`disttrain watch`: verdicts on the last steps of a run, while it runs."""

from __future__ import annotations

import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from disttrain_cli.api import look as look_once
from disttrain_cli.api import open_run, watch
from disttrain_cli.api.analysing import folder_of
from disttrain_cli.commands.common import QuietFlag
from disttrain_cli.console import Console
from disttrain_cli.errors import ConditionHoldsError
from disttrain_cli.naming import short_path

if TYPE_CHECKING:
    from disttrain_cli.analysis.watching.looking import Look

EPILOG = """Examples:

$ disttrain watch
$ disttrain watch runs/tiny --once
$ disttrain watch runs/mllm-9b/rehearsal --every 0
$ disttrain watch --json >> verdicts.jsonl
$ disttrain watch --fail-if "verdict.cause == worker and verdict.lost_s > 0.5"

It ends with the run. Exit code 5 means that a --fail-if condition held in two successive analyses.
"""


def run(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            show_default=False,
            help="The run's folder, or that of its rehearsal; if none is given, the run of"
            " ./disttrain.yaml.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=4, max=32, metavar="N", help="Number of last steps to analyse.")
    ] = 5,
    every: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Minimum time between two analyses; by default such that they use 0.5 % of this"
            " host's cores.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Analyse once, print the result, and end.")
    ] = False,
    fail_if: Annotated[
        str | None,
        typer.Option(
            metavar="EXPR",
            help="Exit with code 5 if this holds: a condition as in `disttrain analyze`, on the"
            " last steps.",
        ),
    ] = None,
    json_mode: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one line of JSON on stdout for every change, and nothing else there.",
        ),
    ] = False,
    quiet: QuietFlag = False,
) -> None:
    """Report what slows a run while it runs, whenever the verdict changes."""
    from disttrain_cli.analysis.expressions import check
    from disttrain_cli.analysis.watching.ending import Ending
    from disttrain_cli.analysis.watching.record import Record
    from disttrain_cli.spec.rundir import RunDir, flight_recorder, run_folder

    console = Console(json_mode=json_mode, quiet=quiet)
    if fail_if is not None:
        check(fail_if)
    folder = open_run().dir.root if path is None else folder_of(path)
    root = RunDir(run_folder(folder) or folder)
    if not once:
        console.note(
            f"Watching {short_path(root.root)} until it ends; Ctrl-C ends only this command."
        )
        if root.root.is_dir() and not (root.traces / "job.json").exists():
            console.note("It has no traces yet; waiting for its first steps.")
        elif Ending(root).over():
            console.note(
                "It has ended; waiting two minutes for its next start. To analyse only its last"
                " steps:"
                f" {shlex.join(['disttrain', 'watch', short_path(root.root), '--once'])}"
            )
    held, reported = False, False
    look: Look | None = None
    with closing(Record(root.logs)) as record:
        looks = (
            iter([look_once(path, steps=steps)])
            if once
            else watch(path, steps=steps, every_s=every)
        )
        for look in looks:
            before, (holds, sentence) = held, _holds(look, fail_if)
            held = holds and (look.live or once)
            fails = held and (before or look.stands)
            if look.changed or look.stays or fails:
                reported = True
                _report(console, look, sentence if fails else "")
            if look.changed and not once:
                record.add(look.row())
            if fails:
                _fail(console, look, sentence)
    _point_to_dumps(console, flight_recorder(root.logs))
    if look is not None and not reported:  # no look follows
        fails = held and once
        _report(console, look, sentence if fails else "")
        if fails:
            _fail(console, look, sentence)


def _point_to_dumps(console: Console, dumps: Path) -> None:
    if dumps.is_dir() and any(dumps.iterdir()):
        console.note(
            "The job hung, and its ranks dumped PyTorch's flight recorder. To see the collective"
            f" and the missing ranks: {shlex.join(['disttrain', 'analyze', short_path(dumps)])}"
        )


def _leaving(look: Look) -> str:
    """Describe the saving of a restart without the slow host or device, or on a new plan."""
    planned = [one for one in look.analysis.remedies if one.basis == "plan" and one.worth]
    if not planned:
        return "no saving by a restart with another plan can be predicted."
    best = max(planned, key=lambda one: one.gain_s)
    return (
        f"a restart with {best.change} would save {best.gain_s:.2f} s of a step"
        f" ({best.gain_pct:.0f} %). {best.command}"
    )


def _holds(look: Look, condition: str | None) -> tuple[bool, str]:
    from disttrain_cli.analysis.expressions import holds

    return (False, "") if condition is None else holds(look.analysis, condition)


def _fail(console: Console, look: Look, sentence: str) -> NoReturn:
    if console.json_mode:  # the printed line holds it
        raise typer.Exit(ConditionHoldsError.exit_code)
    verdict = look.analysis.verdict
    raise ConditionHoldsError(f"Condition holds: {sentence}", verdict.headline, verdict.advice)


def _report(console: Console, look: Look, sentence: str) -> None:
    row = look.row()
    if console.json_mode:
        console.line(row | ({"fail_if": sentence} if sentence else {}))
        return
    verdict = look.analysis.verdict
    when = f"{look.at.astimezone():%H:%M:%S}  steps {look.first} to {look.last}"
    console.say(
        f"{when}  {row['iteration_s']:.3g} s per step  {verdict.headline}"
        f" ({100 * verdict.confidence:.0f} % confidence)"
    )
    if (learned := look.analysis.learning) is not None:
        console.say(f"          {learned.headline}")
        if learned.advice:
            console.say(f"          {learned.advice}")
    for warning in look.analysis.warnings:
        console.say(f"          Note: {warning}")
    for one in look.analysis.drift:
        console.say(f"          {one.sentence}.")
    if look.stays:
        console.say(f"          This persists: {_leaving(look)}")
    if look.found or look.analysis.drift:
        console.say(f"          {verdict.advice}")
        console.say(f"          Next: {verdict.next_command}")
    sys.stdout.flush()
