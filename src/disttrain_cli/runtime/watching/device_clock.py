"""When a GPU reached the points of a step, read afterwards: the host never waits for an answer.

The host runs ahead of its device. A mark is an event on the stream that computes, so it has the
time at which the device gets there, having done (and waited for) all that was asked for before.
Where the host waits for the device anyway, once in a step, the device is idle and an event happens
as soon as it is recorded: such an *anchor* ties the device's time to the host's. Times between two
anchors are interpolated, so they never go backwards, and the two clocks cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

#: An anchor is set again, at most so often, if the host was interrupted for longer than this while
#: it set it.
INTERRUPTED_NS, TRIES = 50_000, 3


class Mark:
    """A place in what the device was asked for."""

    __slots__ = ("anchor_ns", "event", "ns")

    def __init__(self, event: Any) -> None:
        self.event = event
        # when the device got there, by the host's clock; None until it is read
        self.ns: int | None = None
        self.anchor_ns: int | None = None  # of an anchor: when it was set

    def passed(self) -> bool:
        """Whether the device has got there; any thread may ask. A device that failed gets there
        nowhere any more."""
        try:
            return self.ns is not None or bool(self.event.query())
        except RuntimeError:
            return False


class Later:
    """As long after a place as some spans of the device's work take together, the last of which
    ends after all else."""

    def __init__(self, place: Mark | Later, spans: Sequence[tuple[Mark, Mark]]) -> None:
        self._place, self._spans = place, spans
        self._ns: int | None = None

    @property
    def ns(self) -> int | None:
        """As of a mark."""
        if self._ns is None and self._spans[-1][1].ns is not None:
            self._ns = _known(self._place) + sum(
                _known(end) - _known(start) for start, end in self._spans
            )
        return self._ns


def _known(place: Mark | Later) -> int:
    assert place.ns is not None, "marks are read in the stream's order"
    return place.ns


class DeviceClock:
    """Marks on the current stream of the current device.

    Args:
        now: the host's time in ns, that of all rows.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._unused: list[Any] = []  # events of marks that have been read
        self._marks: list[Mark] = []  # those not read yet, in the stream's order
        torch.cuda.synchronize()
        self.anchor()
        self._last = self._marks.pop()  # anchor that was read
        self._last.ns = self._last.anchor_ns

    def mark(self) -> Mark:
        """Mark the end of what the device has been asked for so far."""
        mark = Mark(self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True))
        mark.event.record()
        self._marks.append(mark)
        return mark

    def anchor(self) -> None:
        """Set an anchor: the host has just waited until the device had nothing left to do."""
        mark = self.mark()
        for _ in range(TRIES):
            before_ns = self._now()
            mark.event.record()
            after_ns = self._now()
            if after_ns - before_ns < INTERRUPTED_NS:
                break
        mark.anchor_ns = (before_ns + after_ns) // 2

    def read(self) -> None:
        """Learn the times of all marks up to the last anchor that the device has passed; does not
        wait."""
        anchors = [index for index, mark in enumerate(self._marks, 1) if mark.anchor_ns is not None]
        done = 0
        for index in anchors:
            if self._marks[index - 1].passed():
                self._read(self._marks[done:index])
                done = index
        del self._marks[:done]

    def _read(self, marks: list[Mark]) -> None:
        """From the last anchor that was read to the next one, the last of these marks."""
        first, last = self._last, marks[-1]
        assert first.ns is not None and last.anchor_ns is not None
        # From mark to mark: the answers are single-precision milliseconds.
        passed_ms = list(
            accumulate(a.event.elapsed_time(b.event) for a, b in pairwise([first, *marks]))
        )
        scale = (last.anchor_ns - first.ns) / (passed_ms[-1] or 1.0)
        for mark, ms in zip(marks, passed_ms, strict=True):
            mark.ns = first.ns + round(scale * ms)
        last.ns = last.anchor_ns
        self._unused += [mark.event for mark in (first, *marks[:-1])]
        self._last = last
