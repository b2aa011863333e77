"""How many slots a worker holds at a time, however many are asked for and however slowly they are
read.

Flight cannot end a call whose client reads nothing, be it stopped or gone without a word: such a
one keeps its slot in memory. Its permit goes to who waits, so that `AT_ONCE` of them do not stop a
worker.
"""

from __future__ import annotations

import threading
import time

AT_ONCE = 4  # slots in preparation or on their way
STALL_S = 30.0  # in which a client that lives takes a piece of an answer
MOST_STALLED = 16  # slots kept for clients that take nothing, besides


class Permit:
    """To hold one slot in memory; `sent` is called before each piece of the answer."""

    def __init__(self) -> None:
        self.sent_at: float | None = None

    def sent(self) -> None:
        self.sent_at = time.monotonic()

    def stalled(self) -> bool:
        """Whether the client has not taken the last piece in `STALL_S`."""
        return self.sent_at is not None and time.monotonic() - self.sent_at > STALL_S


class Permits:
    """Who holds one; any thread may ask."""

    def __init__(self) -> None:
        self._held: set[Permit] = set()
        self._stalled: set[Permit] = set()
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> Permit | None:
        """A permit, waiting for it as long."""
        with self._changed:
            if len(self._held) == AT_ONCE and not self._stall():
                self._changed.wait(timeout_s)
            if len(self._held) == AT_ONCE:
                return None
            permit = Permit()
            self._held.add(permit)
            return permit

    def leave(self, permit: Permit) -> None:
        """The slot is in memory no longer."""
        with self._changed:
            self._held.discard(permit)
            self._stalled.discard(permit)
            self._changed.notify()

    def _stall(self) -> bool:
        """Whether a permit became free because who holds it takes nothing."""
        stalled = next((permit for permit in self._held if permit.stalled()), None)
        if stalled is None or len(self._stalled) == MOST_STALLED:
            return False
        self._held.remove(stalled)
        self._stalled.add(stalled)
        return True
