"""Training that is watched from beside it: a process of its own, of lowest priority."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disttrain_cli.naming import short_path

#: Runs that are shorter are not watched.
AFTER_S = 60.0
LOWEST_PRIORITY = 19
#: A verdict less sure is left to `disttrain watch`: of ranks that wait for cores most are.
LEAST_SURE = 0.5


@contextmanager
def watched(
    root: Path,
    say: Callable[[str], None],
    hear: Callable[[dict[str, Any]], None] = lambda row: None,
    after_s: float | None = None,
    every_s: float | None = None,
) -> Iterator[None]:
    """Watch a run while it goes on, and say what slows it, whenever that changes.

    Args:
        root: the run's folder.
        say: called from a thread of its own.
        hear: called from that thread with every line of `disttrain watch --json`.
        after_s: when it begins; None: after `AFTER_S`.
        every_s: seconds between two looks at least; None: as `disttrain watch` has it.
    """
    beside = _Beside(root, say, hear, every_s)
    timer = threading.Timer(AFTER_S if after_s is None else after_s, beside.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        beside.end()


class _Beside:
    """`disttrain watch` as a process, and the thread that listens to it."""

    def __init__(
        self,
        root: Path,
        say: Callable[[str], None],
        hear: Callable[[dict[str, Any]], None] = lambda row: None,
        every_s: float | None = None,
    ) -> None:
        self._root, self._say, self._hear = root, say, hear
        self._rhythm = [] if every_s is None else ["--every", str(every_s)]
        self._process: subprocess.Popen[str] | None = None
        self._ended = False
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "disttrain_cli",
                    "watch",
                    str(self._root),
                    "--json",
                    *self._rhythm,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)
        self._listen(self._process)

    def end(self) -> None:
        with self._lock:
            self._ended = True
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        slowed = False
        for line in process.stdout:
            try:
                row = json.loads(line)
            except ValueError:  # ended while it wrote
                return
            if self._ended or "error" in row:
                return
            sure = row["cause"] != "none" and row["confidence"] >= LEAST_SURE
            found = sure or bool(row["drift"])
            if found or slowed:
                self._say(_sentence(row, self._root))
            slowed = found
            self._hear(row)


def _sentence(row: dict[str, Any], root: Path) -> str:
    drift = row["drift"]
    moved = f" {drift[0]['told']}." if drift else ""
    return (
        f"Steps {row['first_step']} to {row['last_step']}: {row['headline']}{moved}"
        f" More: disttrain watch {short_path(root)} --once"
    )
