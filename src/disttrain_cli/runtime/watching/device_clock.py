"""Device timestamps of a step's marks, read afterwards so that the host never waits for them.

The host runs ahead of its device. A mark is an event on the compute stream, so that its time is the
device's arrival there, after all work that was queued before has been done. Where the host waits
for the device anyway, once in a step, the device is idle and an event completes as soon as it is
recorded: such an *anchor* ties the device's time to the host's. Times between two anchors are
interpolated, so they never go backwards, and the two clocks cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

#: An anchor is retried, at most TRIES times in all, if setting it took the host longer than this.
INTERRUPTED_NS, TRIES = 50_000, 3


class Mark:
    """Point in the device's queue of work."""

    __slots__ = ("anchor_ns", "event", "ns")

    def __init__(self, event: Any) -> None:
        self.event = event
        # the device's arrival by the host's clock; None until it is read
        self.ns: int | None = None
        self.anchor_ns: int | None = None  # of an anchor: the host's time when it was set

    def passed(self) -> bool:
        """Return True if the device has passed the mark; may be called by any thread.

        A device that failed passes no more marks.
        """
        try:
            return self.ns is not None or bool(self.event.query())
        except RuntimeError:
            return False


class Later:
    """Point that follows another one by the total length of some spans of the device's work.

    The last span ends after all others.
    """

    def __init__(self, place: Mark | Later, spans: Sequence[tuple[Mark, Mark]]) -> None:
        self._place, self._spans = place, spans
        self._ns: int | None = None

    @property
    def ns(self) -> int | None:
        """Time as that of a mark; None until it is read."""
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
        now: the host's clock in ns, which all rows use.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._unused: list[Any] = []  # events of marks that have been read
        self._marks: list[Mark] = []  # unread marks, in the stream's order
        torch.cuda.synchronize()
        self.anchor()
        self._last = self._marks.pop()  # the last anchor that was read
        self._last.ns = self._last.anchor_ns

    def mark(self) -> Mark:
        """Mark the end of the work that is queued so far."""
        mark = Mark(self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True))
        mark.event.record()
        self._marks.append(mark)
        return mark

    def anchor(self) -> None:
        """Set an anchor: the host has just waited until the device was idle."""
        mark = self.mark()
        for _ in range(TRIES):
            before_ns = self._now()
            mark.event.record()
            after_ns = self._now()
            if after_ns - before_ns < INTERRUPTED_NS:
                break
        mark.anchor_ns = (before_ns + after_ns) // 2

    def read(self) -> None:
        """Read the times of all marks up to the last anchor that the device has passed.

        Does not wait.
        """
        anchors = [index for index, mark in enumerate(self._marks, 1) if mark.anchor_ns is not None]
        done = 0
        for index in anchors:
            if self._marks[index - 1].passed():
                self._read(self._marks[done:index])
                done = index
        del self._marks[:done]

    def _read(self, marks: list[Mark]) -> None:
        """Set the times of marks from the last read anchor to the next one, the last of `marks`."""
        first, last = self._last, marks[-1]
        assert first.ns is not None and last.anchor_ns is not None
        # From mark to mark, as `elapsed_time` returns single-precision milliseconds.
        passed_ms = list(
            accumulate(a.event.elapsed_time(b.event) for a, b in pairwise([first, *marks]))
        )
        scale = (last.anchor_ns - first.ns) / (passed_ms[-1] or 1.0)
        for mark, ms in zip(marks, passed_ms, strict=True):
            mark.ns = first.ns + round(scale * ms)
        last.ns = last.anchor_ns
        self._unused += [mark.event for mark in (first, *marks[:-1])]
        self._last = last
