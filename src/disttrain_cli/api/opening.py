"""Run files and paths as the functions take them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from disttrain_cli.calls import DEFAULT_RUN_FILE, Reader, argument, now_read_by, read_by
from disttrain_cli.errors import UsageError

if TYPE_CHECKING:
    from disttrain_cli.spec.runfile import Run

Note = Callable[[str], None]


def ignore(note: str) -> None:
    """Take no note."""


def name_run(run: Path | str | None, traces: Sequence[Path] = ()) -> None:
    """Have calls in messages take this run file, or this expression of one; in a shell, what the
    command was given stays."""
    if not now_read_by().shell:
        read_by(Reader(run=run, traces=traces))


def open_run(run: Run | Path | str = DEFAULT_RUN_FILE, *settings: str) -> Run:
    """A run that was read already, or the run file of this name; a folder stands for the
    `disttrain.yaml` in it.

    Args:
        settings: changes of the run file, such as "train.steps=100"; the values are YAML.

    Raises:
        SpecError: it is missing or wrong; the line is named.
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
    """A path that may be given as a text, or not at all."""
    return None if given is None else Path(given)


def not_over(out: Path | None, *inputs: Path) -> None:
    """Raise UsageError where `out`, a file to write, is one of those that are read."""
    for path in inputs:
        if out is not None and out.exists() and path.exists() and out.samefile(path):
            raise UsageError(
                f"{out} is one of the files that are read",
                "it would be replaced",
                "Name another file to write.",
            )


def check_number(
    name: str, value: object, least: int, most: float = math.inf, whole: bool = True
) -> None:
    """UsageError where an argument is neither None nor a number in this range."""
    number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if value is not None and not (number and least <= value <= most):  # type: ignore[operator]
        words = "whole numbers" if whole else "numbers"
        limit = f"{least:,} or more" if most == math.inf else f"{least:,} to {most:,}"
        raise UsageError(f"{argument(name)} cannot be {value!r}", f"allowed: {words}, {limit}")


def check_list(name: str, value: object) -> None:
    """UsageError where an argument is one text or number instead of several."""
    if isinstance(value, str | Path | int):
        raise UsageError(f"{argument(name)} is no list", f"given: {value!r}", f"Give [{value!r}].")


def check_choice(name: str, value: object, literal: Any) -> None:
    """UsageError where an argument is none of a `Literal`."""
    if value not in get_args(literal):
        raise UsageError(
            f"{argument(name)} cannot be {value!r}", f"allowed: {', '.join(get_args(literal))}"
        )
