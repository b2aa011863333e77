"""Published state of each rank, in a small file next to its log, to detect hangs (`hang`).

An update costs a tuple: a thread writes the file periodically. Only files are needed, so that the
ranks of several hosts are monitored over a shared folder just as those of one machine. The state is
that of the rank's device, which may be far behind its host.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from disttrain_cli.errors import RankFailedError
from disttrain_cli.runtime.watching.flight import write_dump
from disttrain_cli.runtime.watching.verdict import Verdict, read_verdict

RECORD_BYTES = 512


class State(BaseModel):
    """State of one rank.

    `operation` is one of `spec.trace.OPERATIONS`, or an activity outside its steps.
    """

    rank: int
    host: str
    process: int
    beat: int  # grows while the process runs
    moves: int  # grows while the rank makes progress
    step: int
    operation: str
    slot: int  # -1: none
    module: str
    stage: int = -1  # of its unit, in a step; -1: outside


def state_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's state."""
    return folder / f"rank-{rank:05d}.json"


def interval_s(hang_s: float) -> float:
    """Return the time between two beats.

    Several fit into the longest time without progress, but few, to spare the file system.
    """
    return min(10.0, max(0.1, hang_s / 10))


class Pulse:
    """State of this rank; `begin` is called for every new operation."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        hang_s: float,
        end: Callable[[Verdict], NoReturn] = lambda verdict: os._exit(RankFailedError.exit_code),
    ) -> None:
        """Set up the state.

        Args:
            end: ends the process when there is a verdict, after its stacks were written to its log.
        """
        self._path, self._folder, self._hang_s = state_file(folder, rank), folder, hang_s
        self._end = end
        self._own: dict[str, Any] = {
            "rank": rank,
            "host": socket.gethostname(),
            "process": os.getpid(),
        }
        # fields of `State` that operations change
        self._now: dict[str, Any] = {"step": -1, "operation": "starting", "slot": -1, "module": ""}
        self._ahead: deque[tuple[dict[str, Any], Callable[[], bool]]] = deque()
        self._moves = self._beat = 0
        self._ended = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)

    def begin(
        self,
        operation: str,
        step: int = -1,
        slot: int = -1,
        module: str = "",
        reached: Callable[[], bool] | None = None,
        stage: int = -1,
    ) -> None:
        """Set the rank's operation, from now or from when `reached` returns True for the device."""
        state = {
            "step": step,
            "operation": operation,
            "slot": slot,
            "module": module,
            "stage": stage,
        }
        if reached is None and not self._ahead:
            self._turn(state)
        else:
            self._ahead.append((state, reached or (lambda: True)))

    def _turn(self, state: dict[str, Any]) -> None:
        self._now = state
        self._moves += 1

    @contextmanager
    def beating(self) -> Iterator[Pulse]:
        """Publish the state periodically from a thread.

        The stacks of a rank that holds the GIL for too long are written, too.
        """
        thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while True:
            self._tell()
            faulthandler.dump_traceback_later(self._hang_s, file=sys.__stderr__ or 2)
            if (verdict := read_verdict(self._folder)) is not None:
                faulthandler.dump_traceback(file=sys.__stderr__ or 2)
                if verdict.hang:
                    write_dump(self._folder.parent, self._own["rank"])
                self._end(verdict)
            if self._ended.wait(interval_s(self._hang_s)):
                self._ahead.clear()  # the device may never reach them
                self.begin("ended")
                self._tell()
                return

    def _tell(self) -> None:
        while self._ahead and self._ahead[0][1]():
            self._turn(self._ahead.popleft()[0])
        self._beat += 1
        record = self._own | self._now | {"beat": self._beat, "moves": self._moves}
        try:  # opened each time, for a shared file system to show it to all hosts
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, json.dumps(record).ljust(RECORD_BYTES).encode(), 0)
            finally:
                os.close(descriptor)
        except OSError as error:  # a full disk: the job may still continue
            print(f"cannot tell this rank's state: {error}", flush=True)


def read_state(folder: Path, rank: int) -> State | None:
    """Return the last published state of a rank; None if there is none that can be read."""
    try:
        return State.model_validate_json(state_file(folder, rank).read_text())
    except (OSError, ValueError):
        return None
