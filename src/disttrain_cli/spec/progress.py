"""How rooms report progress without knowing the console: a callback (what, done, total)."""

from __future__ import annotations

from collections.abc import Callable

#: Called with what is being done, how much is done, and how much there is (0 = unknown).
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""
