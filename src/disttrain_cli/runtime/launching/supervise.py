"""Ranks that are looked after: requests to stop are passed on, a job that hangs is ended, a lost
rank is followed by another start from the newest checkpoint.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from disttrain_cli.errors import RankLostError, SpecError
from disttrain_cli.runtime.checkpoints.folder import latest
from disttrain_cli.runtime.launching.starts import Reports
from disttrain_cli.runtime.watching.hang import HangWatch
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.rundir import pulses, stop_file
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.stage_graph import StageGraph
from disttrain_cli.spec.whole import write_whole


class StopRequest:
    """Whether somebody asked this process to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._passed_on = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The signals' handler: the first one asks, a second one ends this process, and with it the
        ranks, at once."""
        if self.signal is not None:
            raise SystemExit(128 + number)
        self.signal = signal.Signals(number)

    def pass_on(self, logs: Path, progress: Progress) -> None:
        """Tell the ranks, once."""
        if self.signal is not None and not self._passed_on:
            self._passed_on = True
            with suppress(SpecError):  # a full disk has room for an empty file
                write_whole(stop_file(logs), self.signal.name)
            stop_file(logs).touch()
            progress(
                f"{self.signal.name}: stopping after this step, with a checkpoint; once more to end"
                " at once",
                0,
                0,
            )


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Listen to SIGTERM and SIGINT, in the main thread; elsewhere nobody is heard."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    handlers = {
        number: signal.signal(number, request.hear) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def supervised(
    run: Run,
    graph: StageGraph,
    resume: bool,
    request: StopRequest,
    progress: Progress,
    start: Callable[[bool, Callable[[], None]], Reports],
) -> tuple[Reports, list[str]]:
    """Call `start(resume, watch)`, again for every lost rank as often as `train.restarts` allows.

    Returns the last start's reports, and why the job was started again each time.

    Raises:
        RankFailedError: a rank failed once too often, or for a reason that would stop it again.
    """
    losses: list[str] = []
    while True:
        hangs = HangWatch(
            pulses(run.dir.logs), run.dir.logs, graph.stages, run.file.train.longest_hang_s
        )

        def watch(hangs: HangWatch = hangs) -> None:
            request.pass_on(run.dir.logs, progress)
            hangs.poll()

        try:
            return start(resume, watch), losses
        except RankLostError as error:
            if len(losses) == run.file.train.restarts or request.signal is not None:
                raise
            losses.append(error.what)
            newest = latest(run.dir.checkpoints)
            resume = newest is not None
            progress(
                f"{error.what}; starting again from {newest.name if newest else 'the beginning'} "
                f"(restart {len(losses)} of {run.file.train.restarts})",
                0,
                0,
            )


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps in order; of those that were done again after a restart, the last."""
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]
