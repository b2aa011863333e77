"""Run files, paths and arguments in the forms that the functions accept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from disttrain_cli.calls import DEFAULT_RUN_FILE, Reader, argument, now_read_by, read_by
from disttrain_cli.errors import UsageError

if TYPE_CHECKING:
    from disttrain_cli.spec.runfile import Run

Note = Callable[[str], None]


def ignore(note: str) -> None:
    """Discard the note."""


def name_run(run: Path | str | None, traces: Sequence[Path] = ()) -> None:
    """Set the run file, or an expression of one, that calls in messages name.

    In a shell, messages keep the command's own arguments.
    """
    if not now_read_by().shell:
        read_by(Reader(run=run, traces=traces))


def open_run(run: Run | Path | str = DEFAULT_RUN_FILE, *settings: str) -> Run:
    """Read a run file; a run that is already open is returned unless settings change it.

    Args:
        run: the run file, a folder with a `disttrain.yaml`, or an open run.
        settings: changes of the run file, such as "train.steps=100"; the values are YAML.

    Raises:
        SpecError: the file is missing or wrong; the line is named.
        UsageError: a setting is wrong.
    """
    name_run(Path(run) if isinstance(run, Path | str) else "run")
    if not isinstance(run, Path | str) and not settings:
        return run
    from disttrain_cli.spec.runfile import read_run

    if not isinstance(run, Path | str):
        return read_run(run.path, *run.settings, *settings)
    path = Path(run)
    return read_run(path / DEFAULT_RUN_FILE if path.is_dir() else path, *settings)


def path_of(given: Path | str | None) -> Path | None:
    """Return a text or path as a path; None stays None."""
    return None if given is None else Path(given)


def not_over(out: Path | None, *inputs: Path) -> None:
    """Raise UsageError if `out`, a file to write, is one of the files that are read."""
    for path in inputs:
        if out is not None and out.exists() and path.exists() and out.samefile(path):
            raise UsageError(
                f"{out} is one of the input files",
                "it would be replaced",
                "Name another file to write.",
            )


def check_number(
    name: str, value: object, least: int, most: float = math.inf, whole: bool = True
) -> None:
    """Raise UsageError if an argument is neither None nor a number in this range."""
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if value is not None and not (number and least <= value <= most):  # type: ignore[operator]
        words = "whole numbers" if whole else "numbers"
        limit = f"{least:,} or more" if most == math.inf else f"{least:,} to {most:,}"
        raise UsageError(f"{argument(name)} cannot be {value!r}", f"allowed: {words}, {limit}")


def check_list(name: str, value: object) -> None:
    """Raise UsageError if an argument is one text or number instead of several."""
    if isinstance(value, str | Path | int):
        raise UsageError(
            f"{argument(name)} is not a list", f"given: {value!r}", f"Give [{value!r}]."
        )


def check_choice(name: str, value: object, literal: Any) -> None:
    """Raise UsageError if an argument is not a value of a `Literal`."""
    if value not in get_args(literal):
        raise UsageError(
            f"{argument(name)} cannot be {value!r}", f"allowed: {', '.join(get_args(literal))}"
        )
