"""How rooms report progress without knowing the console: a callback (what, done, total)."""

from __future__ import annotations

from collections.abc import Callable

#: Called with what is being done, how much is done, and how much there is (0 = unknown). What is
#: done may have a fraction, which is not shown but counts for the time left.
Progress = Callable[[str, float, int], None]


def silent(what: str, done: float, total: int) -> None:
    """Report nothing."""
