"""Starts of a run: one at a time in a folder, each with a name of its own, following what rank 0 reports."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.runtime.checkpoints.folder import check_belongs, latest, made_from
from disttrain_cli.runtime.launching import launch as launching
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.rundir import RunDir, pulses, stop_file
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.trace import Job, Rehearsed
from disttrain_cli.spec.whole import write_whole


def run_ranks(folder: RunDir, job: Job, target: str, processes: int, payload: dict[str, Any], *, steps: int,
              resume: bool, on_step: Callable[[dict[str, Any]], None] | None, progress: Progress,
              watch: Callable[[], None] = lambda: None) -> Reports:
    """Start the processes of a job and follow them to the end; the job and the payload get the start's name.

    A fresh start moves what an earlier one left to `earlier/`. `watch` is called about every 50 ms.

    Raises:
        RankFailedError: a rank failed.
    """
    name, reports = begin_start(folder, job, resume)
    reader = Reports(name, reports, on_step, progress, steps)
    progress("starting ranks", 0, 0)

    def poll() -> None:
        reader.poll()
        watch()

    launching.launch(processes, target, payload | {"name": name, "steps": steps, "resume": resume, "logs":
                                                   str(folder.logs), "steps_file": str(reports)}, folder.logs,
                     on_poll=poll)
    return reader


def begin_start(folder: RunDir, job: Job, resume: bool) -> tuple[str, Path]:
    """Prepare the run's folder for a start; returns its name and the file for its reports."""
    if not resume:
        move_aside(folder.root)
    shutil.rmtree(pulses(folder.logs), ignore_errors=True)
    stop_file(folder.logs).unlink(missing_ok=True)
    name = next_start(folder)
    write_whole(folder.traces / "job.json", job.model_copy(update={"run": name}).model_dump_json(indent=1))
    reports = folder.logs / f"{name}-steps.jsonl"
    reports.parent.mkdir(parents=True, exist_ok=True)
    reports.touch()
    return name, reports


def job_of(run: Run, plan: Plan, profile: Profile, rehearsed: Rehearsed | None = None) -> Job:
    """What the analysis must know of a job."""
    return Job(run="", strategy=plan.plan.strategy, layout=plan.plan, predicted=plan.predicted, profile=profile,
               gpus_per_node=run.file.cluster.gpus_per_node, rehearsed=rehearsed)


def step_to_resume(run: Run, profile: Profile, folder: RunDir, total: int) -> int:
    """The step of the newest checkpoint, from which a run goes on.

    Raises:
        SpecError: there is none, or it is of the run's last step or a later one.
        MismatchError: it was made from another model or dataset.
    """
    newest = latest(folder.checkpoints)
    if newest is None:
        earlier = sorted(path.parent.parent for path in (folder.root / "earlier").glob("*/checkpoints/step-*"))
        raise SpecError(f"There is no checkpoint to resume from in {folder.checkpoints}",
                        f"an earlier start left some: {earlier[-1]}" if earlier else "",
                        f"Move {earlier[-1] / 'checkpoints'} there, or start without --resume." if earlier
                        else "Start without --resume.")
    step = check_belongs(newest, made_from(run.file, profile.fingerprints.data))
    if step >= total:
        raise SpecError(f"The newest checkpoint is of step {step}, and the run ends at step {total}",
                        next_step=f"Give more steps: disttrain train --resume --steps {step + total}")
    return step


def next_start(root: RunDir) -> str:
    """A name that no start before this one had, also one that ended before it wrote a trace."""
    names = [path.name for path in (*root.logs.glob("start-*"), *root.traces.glob("*/segment-start-*"))]
    numbers = [int(number) for name in names for number in re.findall(r"start-(\d+)", name)]
    return f"start-{max(numbers, default=-1) + 1:03d}"


@contextmanager
def alone(root: RunDir) -> Iterator[None]:
    """Hold the run's folder, which one training at a time may write; the lock ends with the process."""
    root.root.mkdir(parents=True, exist_ok=True)
    with (root.root / ".training").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DisttrainError(f"Another training of this run is under way in {root.root}",
                                 next_step="Wait for it, or give this one another name in its run file.") from None
        yield


#: Figures of a step besides those that every step has.
FIGURES = ("tokens_per_s", "images_per_s", "unit_mfu", "memory_gib", "learning_rate")


class Reports:
    """Follows the file to which rank 0 appends one line per step, and any rank a note."""

    def __init__(self, name: str, path: Path, on_step: Callable[[dict[str, Any]], None] | None, progress: Progress,
                 total: int) -> None:
        self.name = name  # of the start
        self._file = path.open()
        self._on_step, self._progress, self._total = on_step, progress, total
        self._partial = ""
        self.steps: list[dict[str, Any]] = []

    def poll(self) -> None:
        """Take in the steps and notes reported since the last call."""
        *lines, self._partial = (self._partial + self._file.read()).split("\n")
        for line in lines:
            row = json.loads(line)
            if "note" in row:
                self._progress(row["note"], row["done"], row["total"])
                continue
            step = {"step": row["step"], "loss": row["loss"],
                    "losses": {"text": row["loss_text"], "image": row["loss_image"], **row.get("generator_losses", {})},
                    **{key: row[key] for key in ("grad_norm", "iteration_s", "sequences_per_s", "mfu",
                                                 "data_wait_s", "tokens", "images", "targets")},
                    **{key: row[key] for key in FIGURES if key in row}}
            if "evaluation_loss" in row:
                step["evaluation"] = {"text": row["evaluation_loss_text"], "image": row["evaluation_loss_image"],
                                      **row.get("evaluation_generator_losses", {})}
            self.steps.append(step)
            if self._on_step is not None:
                self._on_step(step)
            self._progress("training", row["step"] + 1, self._total)


def move_aside(root: Path) -> None:
    """Keep what an earlier start left, under `earlier/NNN/`."""
    left = [root / name for name in ("traces", "checkpoints", "images") if (root / name).exists()]
    if left:
        numbers = [int(path.name) for path in (root / "earlier").glob("*") if path.name.isdigit()]
        folder = root / "earlier" / f"{max(numbers, default=-1) + 1:03d}"
        folder.mkdir(parents=True)
        for path in [*left, *([root / "logs"] if (root / "logs").exists() else [])]:
            shutil.move(path, folder / path.name)
