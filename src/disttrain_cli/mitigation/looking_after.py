"""Monitoring of a running job, and replanning if its run file requests it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from disttrain_cli.mitigation.monitor import monitored
from disttrain_cli.mitigation.replanning import MakeAnew
from disttrain_cli.runtime.launching.supervise import Planned
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.runfile import Run


@contextmanager
def looked_after(
    run: Run,
    folder: RunDir,
    plan: Plan,
    profile: Profile,
    file: Path,
    note: Callable[[str], None],
    emulated: bool = False,
) -> Iterator[MakeAnew | None]:
    """Monitor a job while it runs; yield its replanner if `train.on_straggler` requests one.

    A rehearsal is monitored only then, from its first step on.

    Args:
        run: the run.
        folder: folder of the run, or of its rehearsal.
        plan: the plan that the job starts with.
        profile: the profile of that plan.
        file: file of the plan.
        note: called from a separate thread.
        emulated: the job is a rehearsal.
    """
    if run.file.train.on_straggler != "replan":
        with nullcontext() if emulated else monitored(folder.root, note):
            yield None
        return
    anew = MakeAnew(run, folder, Planned(plan, profile), file, note, emulated)
    at_once = 0.0 if emulated else None
    with monitored(folder.root, note, anew.hear, at_once, at_once):
        yield anew
