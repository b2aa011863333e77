"""Exit of a failing rank.

The error is reported before anything is closed, because closing may wait for ranks that wait for
this one: to the launcher, on the terminal or job log, and in the rank's log. After that the rank
has `CLOSING_S` to close its resources (a checkpoint that is being written, trackers); then the
other ranks are notified, and the process exits. Nothing is destroyed on the way: see
`process.abort_groups`.
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
STUCK_S = 5  # extra time until SIGALRM, where a call into a device holds the GIL


class Ending:
    """Exit of this process, and its first error, if any."""

    def __init__(
        self, rank: int, log: Path, folder: Path, launcher: Callable[[DisttrainError], None]
    ) -> None:
        """Set up the exit.

        Args:
            rank: of this process.
            log: of this rank, named in the error.
            folder: of the verdicts that ranks share.
            launcher: receives the error.
        """
        self._rank, self._log, self._folder, self._launcher = rank, log, folder, launcher
        self._console, self._text, self._shown, self.code = os.dup(2), "", False, 0

    def tell(self, error: BaseException) -> None:
        """Report an error, and limit the time of closing.

        Only the first error is reported: later ones follow from it.
        """
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
        # file names may not be valid Unicode
        self._text = text.encode(errors="backslashreplace").decode()
        timer = threading.Timer(CLOSING_S, self.leave)
        timer.daemon = True
        timer.start()
        signal.alarm(int(CLOSING_S) + STUCK_S)
        for way in (self._launcher, self._say, lambda _: traceback.print_exception(error)):
            with suppress(OSError):  # a full disk, or a closed terminal
                way(known)

    def leave(self) -> NoReturn:
        """Notify the other ranks of an error, if any, and exit; no destructor runs."""
        try:
            if self._text:
                publish_verdict(
                    self._folder,
                    Verdict(
                        text=self._text, shown_on=socket.gethostname() if self._shown else None
                    ),
                )
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(self.code)

    def follow(self, verdict: Verdict) -> NoReturn:
        """Exit because the job is over; print the verdict on terminals that have not shown it."""
        try:
            self._pass_on(verdict)
        finally:
            os._exit(RankFailedError.exit_code)

    def _say(self, error: DisttrainError) -> None:
        """Write the error to the terminal or job log, unless another rank reports the cause."""
        verdict = read_verdict(self._folder)
        if verdict is not None:
            self._pass_on(verdict)
        elif _speaks() or not error.on_every_rank:
            self._shown = True
            os.write(self._console, self._text.encode())

    def _pass_on(self, verdict: Verdict) -> None:
        if _speaks() and (
            verdict.shown_on is None or (_agent() and verdict.shown_on != socket.gethostname())
        ):
            os.write(self._console, verdict.text.encode())


def _agent() -> bool:
    """Return True if torchrun started this process.

    Each of torchrun's hosts has a terminal; other jobs have one log.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def _speaks() -> bool:
    """Return True if this rank prints errors that all ranks share to its terminal."""
    return os.environ.get("LOCAL_RANK" if _agent() else "RANK") == "0"


_own: Ending | None = None


def begin_ending(ending: Ending) -> Ending:
    """Install the exit of this process."""
    global _own
    _own = ending
    return ending


def follow(verdict: Verdict) -> NoReturn:
    """Exit because of a verdict."""
    if _own is not None:
        _own.follow(verdict)
    os._exit(RankFailedError.exit_code)


@contextmanager
def reported_at_once() -> Iterator[None]:
    """Report errors raised inside before the resources around it are closed."""
    try:
        yield
    except BaseException as error:
        if _own is not None:
            _own.tell(error)
        raise


@contextmanager
def within(limit_s: float, late: Callable[[], DisttrainError]) -> Iterator[None]:
    """Limit the time of a block: after it, the process reports the error of `late` and exits."""

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
