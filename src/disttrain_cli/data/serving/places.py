"""How many slots a worker holds at a time, however many are asked for and however slowly they are
read.

Flight cannot end a call whose client reads nothing, be it stopped or gone without a word: such a
one keeps its slot in memory. Its place goes to who waits, so that `AT_ONCE` of them do not stop a
worker.
"""

from __future__ import annotations

import threading
import time

AT_ONCE = 4  # slots in preparation or on their way
STALL_S = 30.0  # in which a client that lives takes a piece of an answer
MOST_STALLED = 16  # slots kept for clients that take nothing, besides


class Place:
    """One slot's; `sent` is called before each piece of the answer."""

    def __init__(self) -> None:
        self.sent_at: float | None = None

    def sent(self) -> None:
        self.sent_at = time.monotonic()

    def stalled(self) -> bool:
        """Whether the client has not taken the last piece in `STALL_S`."""
        return self.sent_at is not None and time.monotonic() - self.sent_at > STALL_S


class Places:
    """Who holds one; any thread may ask."""

    def __init__(self) -> None:
        self._held: set[Place] = set()
        self._stalled: set[Place] = set()
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> Place | None:
        """A place, waiting for it as long."""
        with self._changed:
            if len(self._held) == AT_ONCE and not self._stall():
                self._changed.wait(timeout_s)
            if len(self._held) == AT_ONCE:
                return None
            place = Place()
            self._held.add(place)
            return place

    def leave(self, place: Place) -> None:
        """The slot is in memory no longer."""
        with self._changed:
            self._held.discard(place)
            self._stalled.discard(place)
            self._changed.notify()

    def _stall(self) -> bool:
        """Whether a place became free because who holds it takes nothing."""
        stalled = next((place for place in self._held if place.stalled()), None)
        if stalled is None or len(self._stalled) == MOST_STALLED:
            return False
        self._held.remove(stalled)
        self._stalled.add(stalled)
        return True
