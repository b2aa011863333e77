"""Supervision of a job: passes on stop requests, ends a hanging job, and restarts.

A lost rank is followed by another start from the newest checkpoint, and a better plan by one on
that plan.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from disttrain_cli.errors import RankLostError, SpecError, Terminated
from disttrain_cli.runtime.checkpoints.folder import latest
from disttrain_cli.runtime.launching.starts import Reports
from disttrain_cli.runtime.watching.hang import HangWatch
from disttrain_cli.runtime.watching.watch import STRAGGLER
from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.rundir import RunDir, pulses, stop_file, stopped_file
from disttrain_cli.spec.stage_graph import stage_graph
from disttrain_cli.spec.whole import write_whole


class Planned(NamedTuple):
    """Plan and profile of a start."""

    plan: Plan
    profile: Profile


class Replanned(Strict):
    """A start on another plan than the one before."""

    step: int  # first step on the plan
    why: str
    left_out: list[int]  # devices
    layout: str
    gpus: int
    predicted_iteration_s: float


class Replanner(Protocol):
    """Source of other plans (`mitigation.replanning`)."""

    def ready(self) -> bool:
        """Return True if there is a better plan than the present one."""
        ...

    def take(self) -> tuple[str, Planned]:
        """Return the reason for a better plan, and the plan, which becomes the run's."""
        ...

    def goes_with(self, device: int) -> Sequence[int]:
        """Return the devices that are excluded together with one, itself included."""
        ...

    def without(self, device: int) -> tuple[str, Planned] | None:
        """Return a plan that excludes a lost device and becomes the run's; None if none fits."""
        ...


class Supervised(NamedTuple):
    """Outcome of a job."""

    planned: Planned  # plan of the last start
    restarts: list[str]  # reason for each start but the first
    replans: list[Replanned]
    stopped: str | None  # the one of `watch.REASONS` that ended it before its last step


class StopRequest:
    """Request to stop this process, by a signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._passed_on = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first requests a stop, a second ends this process and the ranks."""
        if self.signal is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated
        self.signal = signal.Signals(number)

    def end_before_ranks(self, progress: Progress) -> None:
        """End this process if a stop is requested: no rank runs, so there is nothing to save."""
        if self.signal is not None:
            progress(f"{self.signal.name}: ending at once, as no rank has started", 0, 0)
            raise KeyboardInterrupt if self.signal == signal.SIGINT else Terminated

    def pass_on(self, logs: Path, progress: Progress) -> None:
        """Pass the request on to the ranks, once."""
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
    """Handle SIGTERM and SIGINT in the main thread; elsewhere, do nothing."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    handlers = {
        number: signal.signal(number, request.on_signal)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Supervisor:
    """Starts of a job: again for every lost rank and for better plans, at most `restarts` times.

    Args:
        folder: of the run, or of its rehearsal.
        planned: plan of the first start.
        hang_s: longest time without progress before a job counts as hanging.
        ended: returns the number of steps that have ended in all starts.
    """

    def __init__(
        self,
        folder: RunDir,
        planned: Planned,
        restarts: int,
        hang_s: float,
        request: StopRequest,
        progress: Progress,
        ended: Callable[[], int] = lambda: 0,
        replanner: Replanner | None = None,
    ) -> None:
        self._folder, self._planned = folder, planned
        self._most, self._hang_s = restarts, hang_s
        self._request, self._progress, self._ended = request, progress, ended
        self._replanner = replanner
        self._restarts: list[str] = []
        self._replans: list[Replanned] = []
        self._lost: Sequence[int] = ()  # devices, one of which the last start lost

    def run(
        self, resume: bool, start: Callable[[Planned, bool, Callable[[], None]], Reports]
    ) -> Supervised:
        """Call `start(planned, resume, watch)` until the job is over or stopped.

        Raises:
            RankFailedError: a rank failed once too often, or for a reason that would stop it again.
        """
        while True:
            before = self._ended()
            try:
                start(self._planned, resume, self._watch())
            except RankLostError as error:
                if self._used_up or self._request.signal is not None:
                    raise
                self._restarts.append(error.what)
                begun = error.begun
                self._leave_out(error, self._ended() > before)
                if self._request.signal is not None:  # a signal during replanning
                    raise
            else:
                begun, stopped = True, self._stopped()
                if stopped != STRAGGLER or self._replanner is None:
                    return Supervised(self._planned, self._restarts, self._replans, stopped)
                why, planned = self._replanner.take()
                self._restarts.append(why)
                self._go_on_with(why, planned)
                if (asked := self._request.signal) is not None:  # a signal meanwhile
                    return Supervised(self._planned, self._restarts, self._replans, asked.name)
            newest = latest(self._folder.checkpoints)
            if begun:  # else the checkpoints are those of an earlier training
                resume = newest is not None
            self._progress(
                f"{self._restarts[-1]}; starting again from"
                f" {newest.name if newest and resume else 'the beginning'} "
                f"(restart {len(self._restarts)} of {self._most})",
                0,
                0,
            )

    @property
    def _used_up(self) -> bool:
        return len(self._restarts) >= self._most

    def _watch(self) -> Callable[[], None]:
        """Return the function that monitors a start."""
        plan, profile = self._planned
        graph = stage_graph(plan.plan, profile.inputs.llm, profile.tied_layers)
        logs = self._folder.logs
        hangs, asked = HangWatch(pulses(logs), logs, graph.stages, self._hang_s), False

        def watch() -> None:
            nonlocal asked
            self._request.pass_on(logs, self._progress)
            hangs.poll()
            if (
                not asked
                and self._request.signal is None
                and self._replanner is not None
                and self._replanner.ready()
            ):
                asked = True
                if self._used_up:
                    self._progress(
                        "There is a better plan, but no restart is left (train.restarts:"
                        f" {self._most})",
                        0,
                        0,
                    )
                else:
                    with suppress(SpecError):  # a full disk: continue on the present plan
                        write_whole(stop_file(logs), STRAGGLER)

        return watch

    def _stopped(self) -> str | None:
        """Return the reason why the ranks stopped; a signal that came too late for them counts."""
        said = stopped_file(self._folder.logs)
        stopped = said.read_text() if said.exists() else None
        if stopped == STRAGGLER and self._request.signal is not None:
            return self._request.signal.name
        return stopped

    def _leave_out(self, error: RankLostError, went_on: bool) -> None:
        """Exclude a set of devices if it loses one again in the next start, before any step."""
        if self._replanner is None or error.rank is None:
            return
        device = self._planned.plan.plan.devices[error.rank]
        again, self._lost = (
            device in self._lost and not went_on,
            self._replanner.goes_with(device),
        )
        found = self._replanner.without(device) if again else None
        if found is not None:
            self._restarts[-1] = f"{error.what}; {found[0]}"
            self._go_on_with(self._restarts[-1], found[1])

    def _go_on_with(self, why: str, planned: Planned) -> None:
        newest, layout = latest(self._folder.checkpoints), planned.plan.plan
        self._replans.append(
            Replanned(
                step=int(newest.name.rpartition("-")[2]) if newest else 0,
                why=why,
                left_out=layout.left_out,
                layout=layout.describe(),
                gpus=layout.gpus_used,
                predicted_iteration_s=planned.plan.predicted.iteration_s,
            )
        )
        self._planned, self._lost = planned, ()


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows in order of steps; of a step repeated after a restart, the last."""
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]
