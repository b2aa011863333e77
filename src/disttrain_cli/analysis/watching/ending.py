"""Detection of a job's end: its folder is unlocked, and no rank reports its state any more."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path

from disttrain_cli.spec.rundir import RunDir, pulses

#: Ranks report their state every 10 s at least; after this long without a report they have ended.
SILENT_S = 60.0


class Ending:
    """Poll of a run's folder for the end of the job.

    Training holds a lock on the folder on its own host. On other hosts, over a shared folder, only
    the files with the ranks' states are visible.
    """

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder
        self.begun = False  # training was seen to hold its lock
        self._states: dict[str, bytes] | None = None
        self._heard_s = time.monotonic()

    def over(self) -> bool:
        """Return True if the job has begun and ended, as far as this host can see."""
        held = _held(self._folder.root / ".training")
        self.begun |= held
        if held or not (self._folder.traces / "job.json").exists():
            return self.begun and not held
        states = {}
        for file in pulses(self._folder.logs).glob("rank-*.json"):
            try:
                states[file.name] = file.read_bytes()
            except OSError:
                continue
        if states != self._states:
            self._states, self._heard_s = states, time.monotonic()
        if all(map(_ended, states.values())) and (states or self.begun):
            return True
        return time.monotonic() - self._heard_s >= SILENT_S


def _held(lock: Path) -> bool:
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _ended(state: bytes) -> bool:
    try:
        return bool(json.loads(state)["operation"] == "ended")
    except (ValueError, KeyError, TypeError):
        return False
