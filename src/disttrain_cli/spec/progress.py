"""Progress reports independent of the console: a callback (what, done, total)."""

from __future__ import annotations

from collections.abc import Callable

#: Called with the activity, the amount done, and the total (0 = unknown). The amount may have a
#: fraction, which is not shown but counts for the remaining time.
Progress = Callable[[str, float, int], None]


def silent(what: str, done: float, total: int) -> None:
    """Report nothing."""
