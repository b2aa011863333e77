"""Shared parts of the subcommands: run file argument, output flags, next command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from disttrain_cli.calls import DEFAULT_RUN_FILE, set_words

RunFileArgument = Annotated[
    Path, typer.Argument(metavar="RUN.yaml", show_default=True, help="The run file.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a field of the run file for this command, such as train.steps=100; may be"
        " repeated.",
    ),
]
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")
]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the path written.")]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write to this path instead of the run's folder."),
]


def next_command(command: str, run_file: Path, **options: object) -> str:
    """Return `disttrain COMMAND` with the run file, current `--set` options and `options`.

    Options at their default (None or False) are left out.
    """
    words = ["disttrain", command]
    if run_file != DEFAULT_RUN_FILE:
        words.append(str(run_file))
    words += set_words()
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)


def percent(fraction: float | None) -> str:
    """Format 0.1234 as "12.3 %"; a dash where there is no value."""
    return "–" if fraction is None else f"{100 * fraction:.1f} %"
