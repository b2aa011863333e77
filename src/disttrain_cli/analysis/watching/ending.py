"""Whether a job is over: nobody holds its folder, and no rank tells what it does any more."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path

from disttrain_cli.spec.rundir import RunDir, pulses

#: Ranks tell what they do every 10 s at least; after this long without a word they are gone.
SILENT_S = 60.0


class Ending:
    """Looks at a run's folder now and then.

    Training holds a lock on it on its own host. On others, over a shared folder, only the files are
    seen in which ranks tell what they do.
    """

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder
        self.begun = False  # training was seen to hold its lock
        self._states: dict[str, bytes] | None = None
        self._heard_s = time.monotonic()

    def over(self) -> bool:
        """Whether the job has ended, as far as this host can see; not before it has begun."""
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
