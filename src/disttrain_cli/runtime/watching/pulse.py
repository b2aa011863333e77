"""What each rank is doing, in a small file beside its log, for whoever looks for a job that hangs
(`hang`).

To say it costs a tuple: a thread writes the file now and then. The files are all that is needed, so
that the ranks of several hosts are watched over a shared folder just as those of one machine. What
counts is what a rank's device does, which may be far behind what its host has asked for.
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
    """What one rank does. `operation` is one of `spec.trace.OPERATIONS`, or what a rank does
    outside its steps."""

    rank: int
    host: str
    process: int
    beat: int  # grows while the rank lives
    moves: int  # grows while the rank gets on
    step: int
    operation: str
    slot: int  # -1: none
    module: str


def state_file(folder: Path, rank: int) -> Path:
    """Where a rank tells its state."""
    return folder / f"rank-{rank:05d}.json"


def interval_s(hang_s: float) -> float:
    """Time between two beats: some within the longest time without progress, few for the file
    system."""
    return min(10.0, max(0.1, hang_s / 10))


class Pulse:
    """The state of this rank; `begin` is called whenever it turns to something else."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        hang_s: float,
        end: Callable[[Verdict], NoReturn] = lambda verdict: os._exit(RankFailedError.exit_code),
    ) -> None:
        """`end`: what ends the process when there is a verdict; its stacks have been written to its
        log."""
        self._path, self._folder, self._hang_s = state_file(folder, rank), folder, hang_s
        self._end = end
        self._own: dict[str, Any] = {
            "rank": rank,
            "host": socket.gethostname(),
            "process": os.getpid(),
        }
        self._now = (-1, "starting", -1, "")
        self._ahead: deque[tuple[tuple[int, str, int, str], Callable[[], bool]]] = deque()
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
    ) -> None:
        """Say what the rank does from now on; where `reached` is given, from when it says that the
        device is there."""
        if reached is None and not self._ahead:
            self._turn((step, operation, slot, module))
        else:
            self._ahead.append(((step, operation, slot, module), reached or (lambda: True)))

    def _turn(self, state: tuple[int, str, int, str]) -> None:
        self._now = state
        self._moves += 1

    @contextmanager
    def beating(self) -> Iterator[Pulse]:
        """Tell the state now and then. A rank that holds Python's lock for too long has its stacks
        written, too."""
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
                self._ahead.clear()  # what the device has not reached by now it may never reach
                self.begin("ended")
                self._tell()
                return

    def _tell(self) -> None:
        while self._ahead and self._ahead[0][1]():
            self._turn(self._ahead.popleft()[0])
        self._beat += 1
        step, operation, slot, module = self._now
        told = self._own | {
            "beat": self._beat,
            "moves": self._moves,
            "step": step,
            "operation": operation,
            "slot": slot,
            "module": module,
        }
        try:  # opened each time: a file system of several hosts then shows it to all of them
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, json.dumps(told).ljust(RECORD_BYTES).encode(), 0)
            finally:
                os.close(descriptor)
        except OSError as error:  # a full disk: the job itself may go on
            print(f"cannot tell this rank's state: {error}", flush=True)


def read_state(folder: Path, rank: int) -> State | None:
    """What a rank told last; None where it has told nothing that can be read."""
    try:
        return State.model_validate_json(state_file(folder, rank).read_text())
    except (OSError, ValueError):
        return None
