"""Suggested commands with the paths that the user gave.

Other subpackages suggest `disttrain plan`; messages show it with the user's own path.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from disttrain_cli.calls import DEFAULT_RUN_FILE, Reader, read_by, set_words
from disttrain_cli.spec.rundir import run_folder

#: Commands that take a run file, and `analyze`, in texts that suggest them without a path.
_BARE = re.compile(
    r"\bdisttrain (profile|plan|train|export|analyze|data serve|data latents)"
    r"(?=\Z|\n| (?:--(?!help\b|set\b)|&&|\|\|)|[;:,)'`]|\.(?:\s|\Z))"
)


def with_named(text: str, run_file: Path | None = None, traces: Sequence[Path] = ()) -> str:
    """Return a text in which every suggested command has the paths that the user gave.

    Args:
        text: a command, or a text that contains commands.
        run_file: the run file, or its folder, as the user named it.
        traces: traces that the user had analysed: they are added to `analyze`, their run file to
            other commands.
    """
    if run_file is None and traces:
        run_file = run_file_beside(traces[0])

    def named(match: re.Match[str]) -> str:
        if match[1] == "analyze":
            words = [str(path) for path in traces]
        else:
            words = [] if run_file in (None, DEFAULT_RUN_FILE) else [str(run_file)]
            words += set_words()
        return shlex.join(["disttrain", *match[1].split(), *words])

    return _BARE.sub(named, text)


def short_path(path: Path) -> str:
    """Return a path relative to the working folder if it lies inside, else unchanged."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def run_file_beside(traces: Path) -> Path | None:
    """Return the run file of a run's folder, or of traces inside it, as typed from here, if any.

    It lies next to `runs/NAME`.
    """
    folder = run_folder(traces)
    if folder is None:
        return None
    file = Path(os.path.abspath(folder)).parent.parent / DEFAULT_RUN_FILE
    if not file.is_file():
        return None
    return file if traces.is_absolute() else Path(os.path.relpath(file))


def naming(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command so that its messages are spelled for a shell, with the paths it was given."""

    @functools.wraps(run)
    def named(**given: Any) -> Any:
        traces = given.get("paths") or ()
        run_file = given.get("run_file") or (run_file_beside(traces[0]) if traces else None)
        before = read_by(Reader(True, run_file, given.get("settings") or (), traces))
        try:
            return run(**given)
        finally:
            read_by(before)

    return named
