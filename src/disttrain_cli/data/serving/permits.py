"""Limit of the slots that a worker holds at a time, independent of the number and speed of clients.

Flight cannot end a call whose client reads nothing, be it suspended or lost: its slot stays in
memory. Its permit is passed to a waiting request, so that `AT_ONCE` such clients do not block a
worker.
"""

from __future__ import annotations

import threading
import time

AT_ONCE = 4  # slots in preparation or transfer
STALL_S = 30.0  # in which a live client reads a piece of an answer
MOST_STALLED = 16  # additional slots, held for clients that read nothing


class Permit:
    """Permit to hold one slot in memory; `sent` is called before each piece of the answer."""

    def __init__(self) -> None:
        self.sent_at: float | None = None

    def sent(self) -> None:
        self.sent_at = time.monotonic()

    def stalled(self) -> bool:
        """Return True if the client has not read the last piece within `STALL_S`."""
        return self.sent_at is not None and time.monotonic() - self.sent_at > STALL_S


class Permits:
    """The permits of a worker; thread-safe."""

    def __init__(self) -> None:
        self._held: set[Permit] = set()
        self._stalled: set[Permit] = set()
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> Permit | None:
        """Return a permit, or None after waiting `timeout_s`."""
        with self._changed:
            if len(self._held) == AT_ONCE and not self._stall():
                self._changed.wait(timeout_s)
            if len(self._held) == AT_ONCE:
                return None
            permit = Permit()
            self._held.add(permit)
            return permit

    def leave(self, permit: Permit) -> None:
        """Release a permit, as its slot is no longer in memory."""
        with self._changed:
            self._held.discard(permit)
            self._stalled.discard(permit)
            self._changed.notify()

    def _stall(self) -> bool:
        """Free the permit of a client that reads nothing; return True if there was one."""
        stalled = next((permit for permit in self._held if permit.stalled()), None)
        if stalled is None or len(self._stalled) == MOST_STALLED:
            return False
        self._held.remove(stalled)
        self._stalled.add(stalled)
        return True
