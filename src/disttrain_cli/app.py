"""The `disttrain` command: registers subcommands, turns exceptions into messages and exit codes."""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from disttrain_cli import __version__
from disttrain_cli.console import Console, OutputError, nearest_letters
from disttrain_cli.errors import DisttrainError, Terminated
from disttrain_cli.naming import naming

EPILOG = """Examples:

$ disttrain init demo --preset tiny --sample-data
$ cd demo
$ disttrain profile
$ disttrain plan
$ disttrain train
$ disttrain analyze

Exit codes:

0  success
1  an error you can act on (what, why, and what to do next)
2  wrong usage
3  no feasible plan (with the limit in the way)
4  a worker or rank failed (which, and where its log is)
5  a --fail-if condition holds
130  interrupted (Ctrl-C), 143  ended by SIGTERM or a stop file; training writes a checkpoint first

A traceback appears only with DISTTRAIN_DEBUG=1.
"""

# Conditions of the machine, not bugs of disttrain.
MACHINE_ERRORS = {
    errno.ENOSPC: "Free some space and run the command again.",
    errno.EDQUOT: "Free some of your quota and run the command again.",
    errno.EACCES: "Change its permissions, or choose another folder.",
    errno.EPERM: "Change its permissions, or choose another folder.",
    errno.EROFS: "Choose a writable folder.",
    errno.ENOTDIR: "Choose another folder, or move that file.",
    errno.EISDIR: "Name a file, or move that folder.",
    errno.EEXIST: "Move it, or choose another folder.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.EMFILE: "Raise the limit of open files: ulimit -n 65536",
}

#: Modules of `commands/`, in the order of the help; those with an `app` are groups.
COMMANDS = (
    "init",
    "profile",
    "plan",
    "train",
    "analyze",
    "watch",
    "sample",
    "export",
    "data",
    "doctor",
    "models",
    "schema",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"disttrain {__version__}")
        raise typer.Exit()


def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train a multimodal LLM with its own GPUs and parallelism for every module.

    Each command reads one run file and the previous command's output: profile, plan, train,
    analyze.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def command_line(*names: str) -> typer.Typer:
    """Return the command line with these commands, or all; other commands are not imported."""
    app = typer.Typer(
        name="disttrain",
        epilog=_paragraphs(EPILOG),
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(root)
    for name in names or COMMANDS:
        command = import_module(f"disttrain_cli.commands.{name}")
        if hasattr(command, "app"):
            for inner in command.app.registered_commands:
                inner.callback = naming(inner.callback)
                inner.epilog = _paragraphs(inner.epilog or "")
            app.add_typer(command.app, name=name)
        else:
            app.command(name, epilog=_paragraphs(command.EPILOG))(naming(command.run))
    return app


def _paragraphs(text: str) -> str:
    """Join the lines of each paragraph, so that it is wrapped once, at the terminal's width.

    Example commands and exit codes keep their lines.
    """
    return re.sub(r"(?<!\n)\n(?!\n|\$ |\d+  |\Z)", " ", text)


def command_names() -> list[str]:
    """Return every command as the user types it, those of groups after their group."""
    app = command_line()
    names = [command.name or "" for command in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        inner = [command.name or "" for command in group.typer_instance.registered_commands]
        names += [str(group.name), *(f"{group.name} {name}" for name in inner)]
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its exit code (`errors.py` lists their meanings)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    codecs.register_error("nearest", nearest_letters)
    for stream in (sys.stdout, sys.stderr):
        # for locales that lack some of our characters, and for names that are not valid text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="nearest")
    try:
        code = _run(words, Console(json_mode="--json" in words))
        sys.stdout.flush()
    except OSError as error:
        code = _without_output(error)
    sys.exit(code)


def _open_streams() -> None:
    """Open /dev/null for closed streams (`>&-`), so that no file gets their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def _without_output(error: OSError) -> int:
    """Report on stderr that stdout cannot be written, unless its reader closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at exit
    if error.errno != errno.EPIPE:
        Console().error(
            "Cannot write the output",
            error.strerror or "",
            "Free some space, or write it to another place.",
        )
    return 1


def _run(words: list[str], console: Console) -> int:
    asked = [word for word in words[:1] if word in COMMANDS]
    try:
        code = command_line(*asked)(words, prog_name="disttrain", standalone_mode=False)
    except DisttrainError as error:
        _traceback_if_wanted()
        console.error(error.what, error.why, error.next_step, error.exit_code)
        return error.exit_code
    except typer.TyperException as error:
        command = max(
            (name for name in command_names() if name.split() == words[: len(name.split())]),
            key=len,
            default="",
        )
        console.error(
            error.format_message(),
            "",
            " ".join(["disttrain", command, "--help"]).replace("  ", " "),
            exit_code=2,
        )
        return 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Terminated:
        console.error("Terminated", "SIGTERM", exit_code=143)
        return 143
    except OutputError:
        raise
    except OSError as error:
        _traceback_if_wanted()
        if error.errno not in MACHINE_ERRORS:
            return _bug(error, console)
        console.error(
            f"Cannot use {error.filename or 'a file'}: {error.strerror}",
            "",
            MACHINE_ERRORS[error.errno],
        )
        return 1
    except Exception as error:
        _traceback_if_wanted()
        return _bug(error, console)
    if code == 130:
        console.error("Interrupted", "Ctrl-C (SIGINT)", exit_code=130)
    return code if isinstance(code, int) else 0


def _bug(error: Exception, console: Console) -> int:
    next_step = "Run it again with DISTTRAIN_DEBUG=1 to see the traceback, and report it."
    console.error(
        "This is a bug in disttrain, not in your input",
        f"{type(error).__name__}: {error}",
        next_step,
    )
    return 1


def _traceback_if_wanted() -> None:
    if os.environ.get("DISTTRAIN_DEBUG") == "1":
        traceback.print_exc(file=sys.stderr)
