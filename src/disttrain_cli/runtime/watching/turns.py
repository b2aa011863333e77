"""Trace rows of interleaved passes, which alternate between slots and modules without a pause.

Each pass has one row, as long as all its turns together. The rows follow each other in the order of
the slots, from the first turn on, so that readers of a trace need not know of turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from disttrain_cli.runtime.watching.device_clock import Later
from disttrain_cli.runtime.watching.tracing import Tracer

if TYPE_CHECKING:
    from disttrain_cli.runtime.watching.tracing import Time


class Turns:
    """Turns of one operation, from now on."""

    def __init__(self, tracer: Tracer, operation: str) -> None:
        self._tracer, self._operation = tracer, operation
        self._marks = [tracer.mark()]
        self._turns: list[tuple[int, str]] = []  # slot and module

    def timed(self, slot: int, module: str) -> Callable[[], None]:
        """Start a turn; the returned function ends it."""
        self._tracer.begin(self._operation, slot, module)
        self._turns.append((slot, module))
        return lambda: self._marks.append(self._tracer.mark())

    def rows(self) -> Iterator[tuple[int, str, Time, Time]]:
        """Yield slot, module, start and end of every row."""
        spans: dict[tuple[int, str], list[tuple[Any, Any]]] = {}
        for turn, span in zip(self._turns, pairwise(self._marks), strict=True):
            spans.setdefault(turn, []).append(span)
        start: Time = self._marks[0]
        for (slot, module), own in sorted(spans.items(), key=lambda one: one[0][0]):
            end = _later(start, own)
            yield slot, module, start, end
            start = end


def _later(place: Time, spans: Sequence[tuple[Any, Any]]) -> Time:
    if isinstance(place, int):
        return place + sum(end - start for start, end in spans)
    return Later(place, spans)
