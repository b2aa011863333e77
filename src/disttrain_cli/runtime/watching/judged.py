"""What the last verdict on this run says, for the trackers of rank 0.

Whoever watches the run (`disttrain watch`, or the command that trains) appends a line of JSON to a
file beside its logs whenever a verdict changes (`spec.rundir.verdicts_file`).
"""

from __future__ import annotations

import json
from pathlib import Path


class Judged:
    """Follows the file; lines that are there already are of an earlier start."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, b""
        self._offset = path.stat().st_size if path.exists() else 0
        self._lost: dict[str, float] = {}

    def lost(self) -> dict[str, float]:
        """By cause, the share of a step that it costs now; a cause that was mended costs 0."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:  # nobody watches
            return self._lost
        self._offset += len(content)
        *lines, self._partial = (self._partial + content).split(b"\n")
        for line in lines:
            try:
                row = json.loads(line)
                now = {str(row["cause"]): float(row["lost_fraction"])}
            except (ValueError, KeyError, TypeError):  # written to a full disk
                continue
            self._lost = dict.fromkeys(self._lost, 0.0) | now
        return self._lost
