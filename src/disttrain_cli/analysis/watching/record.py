"""File of changed verdicts among the run's logs, which rank 0 reads for its trackers."""

from __future__ import annotations

import fcntl
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from disttrain_cli.spec.rundir import verdicts_file


class Record:
    """Appender to the file of a run's verdicts; of several watchers of a run, one appends.

    Args:
        logs: folder of the run's logs; if it does not exist or cannot be written, nothing is
            recorded.
    """

    def __init__(self, logs: Path) -> None:
        self._path = verdicts_file(logs)
        self._file: io.TextIOWrapper | None = None
        self._wanted = True

    def add(self, row: dict[str, Any]) -> None:
        """Append a look in one write."""
        if not self._wanted:
            return
        try:
            if self._file is None:
                self._file = self._path.open("a")
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError:  # another watcher appends, or the disk is full
            self.close()

    def close(self) -> None:
        """Release the file for another watcher."""
        self._wanted = False
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()
