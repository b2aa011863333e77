"""Classification of names: communication or compute, marks of steps, and operations of collectives.

The patterns are data.
"""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from disttrain_cli.errors import SpecError

KINDS = ("communication", "compute", "mixed", "step")
_OURS = "kernel_patterns.txt"
#: Operations of collectives in names of kernels and annotations; the first match counts.
_OPERATIONS = (
    "reduce_scatter",
    "all_to_all",
    "all_gather",
    "all_reduce",
    "send_recv",
    "broadcast",
    "dispatch",
    "combine",
    "barrier",
    "scatter",
    "gather",
    "reduce",
    "send",
    "receive",
    "recv",
)
_IN_NAMES = {
    re.compile(name.replace("_", "[-_]?"), re.IGNORECASE): "recv" if name == "receive" else name
    for name in _OPERATIONS
}


#: In names of marks: begin of a step, end of a step, and its number.
_BEGINS, _ENDS = (
    re.compile(rf"(?<![a-z])({words})(?![a-z])", re.IGNORECASE)
    for words in ("begin|start", "end|stop|done")
)
_NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


class Pattern(NamedTuple):
    """A line of a list of patterns."""

    kind: str
    expression: re.Pattern[str]
    users: bool  # from the user's list


Patterns = list[Pattern]


class StepMark(NamedTuple):
    """Step that an event's name marks: the pattern's line, the step's number, and the edge."""

    line: int
    number: int | None
    edge: str  # whole, begin or end


def pattern_texts() -> dict[str, str]:
    """Return the user's patterns, if there are any, then the package's: file → text.

    Raises:
        SpecError: the user's file cannot be read as text.
    """
    path = users_patterns()
    ours = resources.files("disttrain_cli") / "templates" / _OURS
    try:
        theirs = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read", str(error), "Rewrite or remove it.") from None
    return {str(path): theirs, _OURS: ours.read_text(encoding="utf-8")}


def users_patterns() -> Path:
    """Return the path of the user's patterns, which need not exist."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "disttrain" / "kernel_patterns.txt"


def read_patterns(texts: dict[str, str]) -> Patterns:
    """Parse patterns: kinds and the expressions that identify them; the first match decides.

    Raises:
        SpecError: a line is not a kind and a regular expression.
    """
    return [
        _pattern(line, number, path)
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]


def pattern_of(name: str, patterns: Patterns) -> Pattern | None:
    """Return the first pattern of communication, compute or both that matches, or None."""
    return next(
        (
            pattern
            for pattern in patterns
            if pattern.kind != "step" and pattern.expression.search(name)
        ),
        None,
    )


def step_of(name: str, patterns: Patterns) -> StepMark | None:
    """Return the step that an event of this name marks, or None."""
    for line, pattern in enumerate(patterns):
        if pattern.kind == "step" and pattern.expression.search(name):
            numbers = _NUMBER.findall(name)
            edge = "begin" if _BEGINS.search(name) else "end" if _ENDS.search(name) else "whole"
            return StepMark(line, int(numbers[-1]) if numbers else None, edge)
    return None


def _pattern(line: str, number: int, path: str) -> Pattern:
    kind, _, expression = line.strip().partition(" ")
    try:
        if kind not in KINDS or not expression.strip():
            raise re.error(f"a line is one of {', '.join(KINDS)} and a regular expression")
        return Pattern(kind, re.compile(expression.strip(), re.IGNORECASE), path != _OURS)
    except re.error as error:
        raise SpecError(
            f"{path}, line {number}, cannot be read: {line.strip()!r}",
            str(error),
            "Correct the line.",
        ) from None


def operation(name: str) -> str:
    """Return a collective's operation, from its kernel's name.

    `ncclKernel_AllReduce_RING_LL…` is an all_reduce.
    """
    return operation_in(name) or name.split("(")[0][:60]


def operation_in(name: str) -> str | None:
    """Return the collective or message in a name, or None."""
    return next((does for written, does in _IN_NAMES.items() if written.search(name)), None)
