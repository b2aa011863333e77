"""Monitor of a run: `disttrain watch` as a process of lowest priority while the run trains.

The process is restarted when it fails, and ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disttrain_cli.naming import short_path
from disttrain_cli.runtime.launching.launch import end_with

#: Shorter runs are not monitored.
AFTER_S = 60.0
#: Delay of the first restart, doubled for each further one up to the longest; reset after a process
#: that ran that long.
RESTART_S, LONGEST_RESTART_S = 1.0, 300.0
LOWEST_PRIORITY = 19
#: Less certain verdicts are not reported: most are about ranks that wait for cores.
LEAST_CONFIDENCE = 0.5


@contextmanager
def monitored(
    root: Path,
    note: Callable[[str], None],
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
    after_s: float | None = None,
    every_s: float | None = None,
) -> Iterator[None]:
    """Monitor a run, and report what slows it whenever that changes.

    Args:
        root: the run's folder.
        note: called from a separate thread.
        on_row: called from that thread with every line of `disttrain watch --json`.
        after_s: seconds until it starts; None: `AFTER_S`.
        every_s: minimum seconds between two verdicts; None: the default of `disttrain watch`.
    """
    monitor = _Monitor(root, note, on_row, every_s)
    timer = threading.Timer(AFTER_S if after_s is None else after_s, monitor.run)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        monitor.end()


class _Monitor:
    """The watch process and the thread that reads its rows."""

    def __init__(
        self,
        root: Path,
        note: Callable[[str], None],
        on_row: Callable[[dict[str, Any]], None] = lambda row: None,
        every_s: float | None = None,
    ) -> None:
        self._root, self._note, self._on_row = root, note, on_row
        self._interval = [] if every_s is None else ["--every", str(every_s)]
        self._process: subprocess.Popen[str] | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Keep a process running until the run is over or `end` is called."""
        delay_s = RESTART_S
        while (process := self._start()) is not None:
            started_s = time.monotonic()
            error = self._listen(process)
            status = process.wait()
            if status == 0 or self._ended.is_set():
                return
            if time.monotonic() - started_s > LONGEST_RESTART_S:
                delay_s = RESTART_S
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"code {status}"
            self._note(
                f"disttrain watch, which monitors this run, ended ({error or how}) and restarts in"
                f" {delay_s:g} s. Its log: {short_path(self._log)}"
            )
            self._ended.wait(delay_s)
            delay_s = min(2 * delay_s, LONGEST_RESTART_S)

    def end(self) -> None:
        with self._lock:
            self._ended.set()
        if self._process is not None:
            self._process.kill()  # also ends a stopped process
            self._process.wait()

    @property
    def _log(self) -> Path:
        return self._root / "logs" / "watch.log"

    def _start(self) -> subprocess.Popen[str] | None:
        """Start the process; return None once the monitor has ended."""
        with self._lock:
            if self._ended.is_set():
                return None
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        __name__,
                        str(os.getpid()),
                        "watch",
                        str(self._root),
                        "--json",
                        *self._interval,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)
        return self._process

    def _listen(self, process: subprocess.Popen[str]) -> str | None:
        """Forward rows until the process ends; return the error that it reports."""
        assert process.stdout is not None
        slowed = False
        for line in process.stdout:
            try:
                row = json.loads(line)
            except ValueError:  # the process ended during a write
                return None
            if self._ended.is_set() or "error" in row:
                return row["error"]["what"] if "error" in row else None
            certain = row["cause"] != "none" and row["confidence"] >= LEAST_CONFIDENCE
            found = certain or bool(row["drift"]) or bool(_learned(row))
            if found or slowed:
                self._note(_sentence(row, self._root))
            slowed = found
            self._on_row(row)
        return None


def _sentence(row: dict[str, Any], root: Path) -> str:
    drift = row["drift"]
    moved = f" {drift[0]['sentence']}." if drift else ""
    return (
        f"Steps {row['first_step']} to {row['last_step']}: {row['headline']}{moved}{_learned(row)}"
        f" More: disttrain watch {short_path(root)} --once"
    )


def _learned(row: dict[str, Any]) -> str:
    """Return a sentence on losses that show a fault; empty if they show none."""
    learned = row.get("learning")
    if learned is None or not learned["advice"]:
        return ""
    return f" The run is {learned['headline']}. {learned['advice']}"


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    runpy.run_module("disttrain_cli", run_name="__main__")
