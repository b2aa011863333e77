"""Starts of a run: one at a time per folder, with numbered names, followed by rank 0's reports."""

from __future__ import annotations

import errno
import fcntl
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from disttrain_cli.calls import argument, call
from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.runtime.checkpoints.folder import check_belongs, latest, made_from
from disttrain_cli.runtime.launching import launch as launching
from disttrain_cli.runtime.watching.lines import reported
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.rundir import RunDir, flight_recorder, pulses, stop_file, stopped_file
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.trace import Job, Rehearsed
from disttrain_cli.spec.whole import write_whole


def run_ranks(
    folder: RunDir,
    job: Job,
    target: str,
    processes: int,
    payload: dict[str, Any],
    *,
    steps: int,
    resume: bool,
    on_step: Callable[[dict[str, Any]], None] | None,
    progress: Progress,
    note: Callable[[str], object] = lambda sentence: None,
    watch: Callable[[], None] = lambda: None,
    wait: Callable[[], None] = lambda: None,
    variables: Mapping[str, str] | None = None,
) -> Reports:
    """Start the processes of a job and follow them to the end.

    The job and the payload get the start's name. A fresh start moves the output of an earlier one
    to `earlier/`, once the target's `before_fork` has succeeded.

    Args:
        note: called with each note of `before_fork`.
        watch: called about every 50 ms once the start has begun.
        wait: called about every 50 ms until then.
        variables: added to the processes' environment.

    Raises:
        SpecError: a folder of the run cannot be written.
        RankFailedError: a rank failed.
        DisttrainError: as the target's `before_fork`.
    """
    begun: list[Reports] = []
    progress("starting ranks", 0, 0)

    def begin(notes: list[str]) -> dict[str, Any]:
        for sentence in notes:
            note(sentence)
        name, reports, moved = begin_start(folder, job, resume)
        for sentence in moved:
            progress(sentence, 0, 0)
        begun.append(Reports(name, reports, on_step, progress, steps))
        return {"name": name, "steps_file": str(reports)}

    def poll() -> None:
        if not begun:
            wait()
        for reader in begun:
            reader.poll()
            watch()

    try:
        launching.launch(
            processes,
            target,
            payload | {"steps": steps, "resume": resume, "logs": str(folder.logs)},
            folder.logs,
            begin=begin,
            on_poll=poll,
            variables=variables,
        )
    finally:
        for reader in begun:
            reader.poll()  # reports from just before a rank failed
    return begun[0]


def begin_start(folder: RunDir, job: Job, resume: bool) -> tuple[str, Path, list[str]]:
    """Prepare the run's folder for a start; return its name, report file and notes for the user.

    Raises:
        SpecError: a folder of the run cannot be written.
    """
    for each in (folder.checkpoints, folder.traces, folder.images, folder.logs):
        _check_writable(each)
    notes = [] if resume else move_aside(folder)
    for of_a_start in (pulses(folder.logs), flight_recorder(folder.logs)):
        shutil.rmtree(of_a_start, ignore_errors=True)
    for left in (stop_file(folder.logs), stopped_file(folder.logs)):
        left.unlink(missing_ok=True)
    name = next_start(folder)
    try:
        write_whole(
            folder.traces / "job.json",
            job.model_copy(update={"run": name}).model_dump_json(indent=1),
        )
    except SpecError as error:  # a full disk
        notes.append(f"warning: {error.what}: {error.why}; training goes on")
    reports = folder.logs / f"{name}-steps.jsonl"
    reports.parent.mkdir(parents=True, exist_ok=True)
    reports.touch()
    return name, reports, notes


def _check_writable(folder: Path) -> None:
    """Raise SpecError if an existing or future folder cannot be written."""
    there = folder
    while not (there.exists() or there.is_symlink()):
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        link = f"it is a link to {there.readlink()}: " if there.is_symlink() else ""
        raise SpecError(
            f"Cannot write into {there}",
            f"{link}{error.strerror}",
            "Make it a folder that you can write, or a link to one; then run the command again.",
        ) from None


def check_fresh(folder: RunDir, call_of: Callable[..., str] = partial(call, "train")) -> None:
    """Raise SpecError if checkpoints exist and the user has not chosen to resume or restart."""
    newest = latest(folder.checkpoints)
    if newest is not None:
        raise SpecError(
            f"There are checkpoints of an earlier training in {folder.checkpoints}",
            f"the newest is {newest.name}",
            f"Go on from it: {call_of(resume=True)}. Or start at step 0 and move what is"
            f" there to earlier/: {call_of(restart=True)}",
        )


def job_of(run: Run, plan: Plan, profile: Profile, rehearsed: Rehearsed | None = None) -> Job:
    """Return the description of a job for the analysis."""
    return Job(
        run="",
        strategy=plan.plan.strategy,
        layout=plan.plan,
        predicted=plan.predicted,
        profile=profile,
        gpus_per_node=run.file.cluster.gpus_per_node,
        rehearsed=rehearsed,
    )


def step_to_resume(run: Run, profile: Profile, folder: RunDir, total: int) -> int:
    """Return the step of the newest checkpoint, from which a run resumes.

    Raises:
        SpecError: there is none, or it is of the run's last step or a later one.
        MismatchError: it was made from another model or dataset.
    """
    newest = latest(folder.checkpoints)
    if newest is None:
        earlier = sorted(
            {
                path.parent
                for where in ("earlier/*/checkpoints/step-*", "checkpoints/earlier/*/step-*")
                for path in folder.root.glob(where)
            }
        )
        raise SpecError(
            f"There is no checkpoint to resume from in {folder.checkpoints}",
            f"an earlier start left some: {earlier[-1]}" if earlier else "",
            f"Move the folders in {earlier[-1]} there, or start without {argument('resume', True)}."
            if earlier
            else f"Start without {argument('resume', True)}.",
        )
    step = check_belongs(newest, made_from(run, profile))
    if step >= total:
        raise SpecError(
            f"The newest checkpoint is of step {step}, and the run ends at step {total}",
            next_step=f"Raise {run.file.train.ends_by} in the run file, then:"
            f" {call('train', resume=True)}",
        )
    return step


def next_start(root: RunDir) -> str:
    """Return a name that no earlier start had, not even one that ended before it wrote a trace."""
    names = [
        path.name for path in (*root.logs.glob("start-*"), *root.traces.glob("*/segment-start-*"))
    ]
    numbers = [int(number) for name in names for number in re.findall(r"start-(\d+)", name)]
    return f"start-{max(numbers, default=-1) + 1:03d}"


@contextmanager
def alone(root: RunDir) -> Iterator[None]:
    """Lock the run's folder, which one training at a time may write; the process' exit unlocks it.

    Raises:
        SpecError: the folder cannot be written.
        DisttrainError: another training holds the lock.
    """
    _check_writable(root.root)
    root.root.mkdir(parents=True, exist_ok=True)
    with (root.root / ".training").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DisttrainError(
                f"Another training of this run, or data latents, is under way in {root.root}",
                next_step="Wait for it, or give this one another name in its run file.",
            ) from None
        yield


class Reports:
    """Follower of the file to which rank 0 appends a line per step, and any rank a note."""

    def __init__(
        self,
        name: str,
        path: Path,
        on_step: Callable[[dict[str, Any]], None] | None,
        progress: Progress,
        total: int,
    ) -> None:
        self.name = name  # name of the start
        self._file = path.open()
        self._on_step, self._progress, self._total = on_step, progress, total
        self._partial = ""
        self._noted: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []

    def poll(self) -> None:
        """Read the steps and notes reported since the last call."""
        *lines, self._partial = (self._partial + self._file.read()).split("\n")
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # a line that was cut off by a full disk
                continue
            if "note" in row:
                if row != self._noted:  # several ranks report the same note
                    self._progress(row["note"], row["done"], row["total"])
                self._noted = row
                continue
            step = reported(row)
            self.steps.append(step)
            if self._on_step is not None:
                self._on_step(step)
            self._progress("training", row["step"] + 1, self._total)


def move_aside(folder: RunDir) -> list[str]:
    """Move the output of an earlier start to `earlier/NNN/`; return notes on what was moved.

    A folder that is a link or another disk stays: the run's files in it are moved to an
    `earlier/NNN/` inside it.
    """
    outputs = (folder.traces, folder.checkpoints, folder.images, folder.tensorboard)
    left = [path for path in outputs if any(_left_in(path))]
    if not left:
        return []
    numbers = [
        int(path.name)
        for where in ("earlier/*", "*/earlier/*")
        for path in folder.root.glob(where)
        if path.name.isdigit()
    ]
    aside = folder.root / "earlier" / f"{max(numbers, default=-1) + 1:03d}"
    left += [folder.logs] if folder.logs.exists() else []
    moved = dict.fromkeys(_set_aside(path, aside) for path in left)
    return [f"Moved what an earlier start left to {moved_to}" for moved_to in moved]


def _set_aside(path: Path, aside: Path) -> Path:
    """Move a folder, or the contents of a link or another disk; return the destination."""
    aside.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink():
        try:
            path.rename(aside / path.name)
            return aside
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EXDEV):
                raise
    inside = path / "earlier" / aside.name
    inside.mkdir(parents=True, exist_ok=True)
    for entry in list(_left_in(path)):
        entry.rename(inside / entry.name)
    return inside


def _left_in(path: Path) -> Iterator[Path]:
    """Yield the files that starts write into a folder of the run, which may hold others, too."""
    for pattern in (
        "step-*",
        "rank-*",
        "start-*",
        "job.json",
        "kineto",
        "pulse",
        "sampling",
        "starter.log",
        "events.out.tfevents.*",
    ):
        yield from path.glob(pattern)
    yield from {
        segment.parent for segment in path.glob("*/segment-*") if not segment.parent.match("rank-*")
    }
