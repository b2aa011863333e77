"""How a rank that fails ends.

What went wrong is told before anything is closed, because closing may wait for ranks that wait for
this one: to the launcher, on the terminal or job log, and in the rank's log. After that the rank
has `CLOSING_S` to close what it has open (a checkpoint that is being written, trackers); then the
other ranks are told, and the process exits. Nothing is destroyed on the way: `process.abort_groups`
says why.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from disttrain_cli.errors import DisttrainError, RankFailedError
from disttrain_cli.runtime.watching.verdict import Verdict, publish_verdict, read_verdict

CLOSING_S = 15.0
STUCK_S = 5  # after that, where a call into a device holds even Python's lock


class Ending:
    """The end of this process, and its first error, if any."""

    def __init__(
        self, rank: int, log: Path, folder: Path, launcher: Callable[[DisttrainError], None]
    ) -> None:
        """`folder`: where ranks look for a verdict. `launcher`: takes the error, where there is one
        of ours."""
        self._rank, self._log, self._folder, self._launcher = rank, log, folder, launcher
        self._console, self._text, self._told, self.code = os.dup(2), "", False, 0

    def tell(self, error: BaseException) -> None:
        """Tell an error, and limit the time of closing. Of several the first is told: the others
        follow from it."""
        if self._text:
            return
        known = (
            error
            if isinstance(error, DisttrainError)
            else DisttrainError(
                f"{type(error).__name__}: {error}", "\n".join(getattr(error, "__notes__", []))
            )
        )
        self.code = RankFailedError.exit_code if known is error else 1
        text = f"rank {self._rank} ({socket.gethostname()}): {known}\nlog: {self._log}\n"
        # names of files may be no Unicode
        self._text = text.encode(errors="backslashreplace").decode()
        timer = threading.Timer(CLOSING_S, self.leave)
        timer.daemon = True
        timer.start()
        signal.alarm(int(CLOSING_S) + STUCK_S)
        for way in (self._launcher, self._say, lambda _: traceback.print_exception(error)):
            with suppress(OSError):  # a full disk, or a terminal that is gone
                way(known)

    def leave(self) -> NoReturn:
        """Tell the other ranks, if there is something to tell, and exit; no destructor runs."""
        try:
            if self._text:
                publish_verdict(
                    self._folder,
                    Verdict(text=self._text, told_on=socket.gethostname() if self._told else None),
                )
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(self.code)

    def follow(self, verdict: Verdict) -> NoReturn:
        """Exit because the job is over; the verdict is told once wherever nobody has seen it."""
        try:
            self._pass_on(verdict)
        finally:
            os._exit(RankFailedError.exit_code)

    def _say(self, error: DisttrainError) -> None:
        """Write the error to the terminal or job log, unless another rank has said or will say
        why."""
        verdict = read_verdict(self._folder)
        if verdict is not None:
            self._pass_on(verdict)
        elif _speaks() or not error.on_every_rank:
            self._told = True
            os.write(self._console, self._text.encode())

    def _pass_on(self, verdict: Verdict) -> None:
        if _speaks() and (
            verdict.told_on is None or (_agent() and verdict.told_on != socket.gethostname())
        ):
            os.write(self._console, verdict.text.encode())


def _agent() -> bool:
    """Whether torchrun has started this process: each of its hosts has a terminal; other jobs have
    one log."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _speaks() -> bool:
    """Whether this rank tells what all know, on its terminal."""
    return os.environ.get("LOCAL_RANK" if _agent() else "RANK") == "0"


_own: Ending | None = None


def begin_ending(ending: Ending) -> Ending:
    """Make this the ending of this process."""
    global _own
    _own = ending
    return ending


def follow(verdict: Verdict) -> NoReturn:
    """Exit because of a verdict."""
    if _own is not None:
        _own.follow(verdict)
    os._exit(RankFailedError.exit_code)


@contextmanager
def told_at_once() -> Iterator[None]:
    """What goes wrong inside is told before whatever is open around it is closed."""
    try:
        yield
    except BaseException as error:
        if _own is not None:
            _own.tell(error)
        raise


@contextmanager
def within(limit_s: float, late: Callable[[], DisttrainError]) -> Iterator[None]:
    """What has no time limit of its own gets one: after it, the process tells an error and ends."""

    def end() -> None:
        if _own is not None:
            _own.tell(late())
            _own.leave()

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
