"""Task of a rank in one start of a run: its inputs, its steps, and where its outputs go."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from disttrain_cli.runtime.watching.lines import Narration
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.runfile import Run


@dataclass(frozen=True)
class Task:
    """Inputs and number of steps of a start, and the locations of its outputs."""

    run: Run
    plan: Plan
    profile: Profile
    dir: RunDir
    name: str  # of the start, in names of trace files
    resume: bool
    steps: int  # in all, earlier starts' included
    reports: Path  # rank 0 appends a line per step, any rank notes on what it waits for
    narration: Narration | None = None  # where no launcher reads the reports

    @classmethod
    def of(cls, payload: dict[str, Any], run: Run, plan: Plan, profile: Profile) -> Self:
        """Return the task of a rank's payload."""
        steps = int(payload["steps"])
        return cls(
            run,
            plan,
            profile,
            RunDir(Path(payload["logs"]).parent),
            payload["name"],
            payload["resume"],
            steps,
            Path(payload["steps_file"]),
            Narration(payload["console"], steps) if "console" in payload else None,
        )

    def say(self, text: str) -> None:
        """Show a note to the user, and print it to the rank's log."""
        if self.narration is not None:
            self.narration.say(text)
        with contextlib.suppress(OSError):  # a full disk
            print(text, flush=True)
        publish(self.reports, {"note": text, "done": 0, "total": 0})


def publish(path: Path, row: dict[str, Any]) -> None:
    """Append a step or a note to the launcher's file in one write; a full disk is ignored."""
    with contextlib.suppress(OSError), path.open("a") as file:
        file.write(json.dumps(row) + "\n")
