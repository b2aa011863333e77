"""Follower of a run's verdicts, for the trackers of rank 0.

A process that monitors the run (`disttrain watch`, or the command that trains) appends a line of
JSON to a file next to its logs whenever a verdict changes (`spec.rundir.verdicts_file`).
"""

from __future__ import annotations

import json
from pathlib import Path


class Judged:
    """Follower of the file; lines that exist already are of an earlier start."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, b""
        self._offset = path.stat().st_size if path.exists() else 0
        self._lost: dict[str, float] = {}

    def lost(self) -> dict[str, float]:
        """Return the share of a step that each cause costs now; 0 for a cause that was removed."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:  # no process monitors the run
            return self._lost
        self._offset += len(content)
        *lines, self._partial = (self._partial + content).split(b"\n")
        for line in lines:
            try:
                row = json.loads(line)
                now = {str(row["cause"]): float(row["lost_fraction"])}
            except (ValueError, KeyError, TypeError):  # a line cut off by a full disk
                continue
            self._lost = dict.fromkeys(self._lost, 0.0) | now
        return self._lost
