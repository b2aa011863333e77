"""Output shared by training and rehearsals: figures of the latest step, and data drift."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.console import Console
from disttrain_cli.naming import short_path, with_named
from disttrain_cli.runtime.watching.lines import StepLines

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile
    from disttrain_cli.spec.progress import Progress


class LiveStep:
    """Progress callback that shows the latest step's figures and the remaining time."""

    def __init__(self, progress: Progress, learns: bool = True) -> None:
        self._progress, self._lines = progress, StepLines(learns)
        self._figures = ""
        self._first: tuple[float, float] | None = None

    def on_step(self, step: dict[str, Any]) -> None:
        """Record one finished step."""
        self._figures = self._lines.of(step)

    def __call__(self, what: str, done: float, total: int) -> None:
        if what == "training" and self._figures:
            what = f"{what}  {self._figures}  {self._left(done, total)}"
        self._progress(what, done, total)

    def _left(self, done: float, total: int) -> str:
        now_s = time.monotonic()
        if self._first is None or done <= self._first[1]:
            self._first = (now_s, done)
            return ""
        since_s, since = self._first
        left_s = round((now_s - since_s) / (done - since) * (total - done))
        return f"{left_s // 60}:{left_s % 60:02d} left"


def say_drift(
    console: Console,
    run_file: Path,
    profile: Profile,
    plan: Plan,
    steps: list[dict[str, Any]],
    folder: Path,
) -> None:
    """Print how the data have drifted from the data that the plan was made for."""
    from disttrain_cli.data.drift import drift

    moves = drift(profile, [step | {"sequences": plan.plan.global_batch_size} for step in steps])
    for move in moves:
        console.say(f"{move.sentence}.")
    if moves:
        command = (
            f"disttrain profile --calibrate {shlex.quote(short_path(folder))} && disttrain plan"
        )
        console.say(f"Plan for these data: {with_named(command, run_file)}")
