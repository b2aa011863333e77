"""Communication told from compute by the evidence of names: patterns as data, and what a collective is called."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

from disttrain_cli.errors import SpecError

KINDS = ("communication", "compute")
#: Operations of collectives as they stand in names of kernels and annotations, longest first.
_OPERATIONS = ("reduce_scatter", "all_to_all", "all_gather", "all_reduce", "send_recv", "broadcast", "dispatch",
               "combine", "barrier", "scatter", "gather", "reduce", "send", "recv")
_IN_ONE = re.compile("|".join(name.replace("_", "_?") for name in _OPERATIONS), re.IGNORECASE)
_BY_LETTERS = {name.replace("_", ""): name for name in _OPERATIONS}


Patterns = list[tuple[str, re.Pattern[str]]]


def pattern_texts() -> dict[str, str]:
    """The user's patterns, if there are any, then ours: file → text.

    Raises:
        SpecError: the user's file is no text.
    """
    path = users_patterns()
    ours = resources.files("disttrain_cli") / "templates" / "kernel_patterns.txt"
    try:
        theirs = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read", str(error), "Write it again, or move it away.") from None
    return {str(path): theirs, "kernel_patterns.txt": ours.read_text(encoding="utf-8")}


def users_patterns() -> Path:
    """Where the user's own patterns stand, if there are any."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "disttrain" / "kernel_patterns.txt"


def read_patterns(texts: dict[str, str]) -> Patterns:
    """Kinds and the expressions that tell them; the first match decides.

    Raises:
        SpecError: a line is not a kind and a regular expression.
    """
    return [_pattern(line, number, path) for path, text in texts.items()
            for number, line in enumerate(text.splitlines(), 1) if _says(line)]


def kind_of(name: str, patterns: Patterns) -> str | None:
    """communication, compute, or None where no pattern matches."""
    return next((kind for kind, pattern in patterns if pattern.search(name)), None)


def _says(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _pattern(line: str, number: int, path: str) -> tuple[str, re.Pattern[str]]:
    kind, _, expression = line.strip().partition(" ")
    try:
        if kind not in KINDS or not expression.strip():
            raise re.error(f"a line is one of {', '.join(KINDS)} and a regular expression")
        return kind, re.compile(expression.strip(), re.IGNORECASE)
    except re.error as error:
        raise SpecError(f"{path}, line {number}, cannot be read: {line.strip()!r}", str(error),
                        "Correct the line.") from None


def operation(name: str) -> str:
    """What a collective does, from its kernel's name: `ncclKernel_AllReduce_RING_LL…` is an all_reduce."""
    found = _IN_ONE.search(name)
    return name.split("(")[0][:60] if found is None else _BY_LETTERS[found.group().lower().replace("_", "")]
