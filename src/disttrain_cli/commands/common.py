"""What the subcommands share: the run file argument, the output flags, and the next command to
suggest."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disttrain_cli.commands.naming import DEFAULT_RUN_FILE
from disttrain_cli.errors import UsageError

if TYPE_CHECKING:
    from disttrain_cli.spec.runfile import Run

RunFileArgument = Annotated[
    Path, typer.Argument(metavar="RUN.yaml", show_default=True, help="The run file.")
]
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")
]
QuietFlag = Annotated[
    bool, typer.Option("--quiet", "-q", help="No chatter; print only the path written.")
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write here instead of in the run's folder.")
]


def open_run(path: Path) -> Run:
    """Read the run file the user named; a folder stands for the `disttrain.yaml` in it."""
    from disttrain_cli.spec.runfile import read_run

    return read_run(path / DEFAULT_RUN_FILE if path.is_dir() else path)


def not_over(out: Path | None, *inputs: Path) -> None:
    """Raise UsageError where `out`, a file to write, is one of those that the command reads."""
    for path in inputs:
        if out is not None and out.exists() and path.exists() and out.samefile(path):
            raise UsageError(
                f"{out} is what this command reads",
                "it would be replaced",
                "Name another file to write.",
            )


def next_command(command: str, run_file: Path, **options: object) -> str:
    """`disttrain COMMAND`, with the run file and those options that are not at their default (None,
    or False)."""
    words = ["disttrain", command]
    if run_file != DEFAULT_RUN_FILE:
        words.append(str(run_file))
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)


def percent(fraction: float | None) -> str:
    """0.1234 as "12.3 %"; a dash where there is no value."""
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def short_path(path: Path) -> str:
    """A path relative to the working folder where it lies inside it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
