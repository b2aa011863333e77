"""The launcher's side of a training job: prepares the run's folder, starts the ranks, and collects what they report."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from disttrain_cli.data.index import Index, read_index
from disttrain_cli.data.statistics import unigram_entropy
from disttrain_cli.errors import DisttrainError, MismatchError, SpecError
from disttrain_cli.runtime import launch as launching
from disttrain_cli.runtime.checkpoint_folder import check_belongs, latest
from disttrain_cli.spec.files import write_whole
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.trace import Job


class TrainResult(BaseModel):
    """What `train --json` prints."""

    run_dir: str
    steps: list[dict[str, Any]]
    skipped_samples: list[dict[str, str]]
    resumed_from_step: int | None
    checkpoint: str | None
    trace: str
    images: list[str]
    reference_losses: dict[str, float]


def train(run: Run, plan: Plan, profile: Profile, *, steps: int | None = None, resume: bool = False,
          on_step: Callable[[dict[str, Any]], None] | None = None, progress: Progress = silent) -> TrainResult:
    """Run the plan to `steps` optimizer steps (the run file's, if not given) and generate sample images.

    The plan must have been checked against the run and profile (`planning.check`). A fresh start moves what an
    earlier one left to `earlier/`; `resume` goes on from the newest checkpoint.

    Raises:
        SpecError: the plan asks for what this runtime does not run (TP), or there is nothing to resume from.
        DisttrainError: another training of this run is under way.
        MismatchError: the dataset or the checkpoint is not the one of the profile.
        RankFailedError: a rank failed.
    """
    index = _checked_index(run, profile)
    root, total = run.dir, steps if steps is not None else run.file.train.steps
    resumed = _step_to_resume(run, profile) if resume else None
    if resumed is not None and resumed >= total:
        raise SpecError(f"The newest checkpoint is of step {resumed}, and the run ends at step {total}",
                        next_step=f"Give more steps: disttrain train --resume --steps {resumed + total}")
    with _alone(root):
        reader = _run_ranks(run, plan, profile, total, resume, on_step, progress)
        newest = root.checkpoints / f"step-{total:06d}"
        return TrainResult(
            run_dir=str(root.root), steps=reader.steps, skipped_samples=_skipped(run, index),
            resumed_from_step=resumed, checkpoint=str(newest), trace=str(root.traces),
            images=_generate(run, profile, newest, progress), reference_losses=_references(run, index))


def _run_ranks(run: Run, plan: Plan, profile: Profile, total: int, resume: bool,
               on_step: Callable[[dict[str, Any]], None] | None, progress: Progress) -> _Reports:
    root = run.dir
    if not resume:
        _move_aside(root.root)
    name = next_start(root)
    job = Job(run=name, strategy=plan.plan.strategy, layout=plan.plan, predicted=plan.predicted, profile=profile)
    write_whole(root.traces / "job.json", job.model_dump_json(indent=1))
    reports = root.logs / f"{name}-steps.jsonl"
    reports.parent.mkdir(parents=True, exist_ok=True)
    reports.touch()
    reader = _Reports(reports, on_step, progress, total)
    payload = {"run": str(run.path.resolve()), "plan": plan.model_dump(mode="json"), "name": name,
               "profile": profile.model_dump(mode="json"), "steps": total, "resume": resume,
               "steps_file": str(reports), "skipped_dir": str(root.logs)}
    progress("starting ranks", 0, 0)
    launching.launch(plan.plan.gpus_used, "disttrain_cli.runtime.worker:main", payload, root.logs,
                     on_poll=reader.poll)
    return reader


def next_start(root: RunDir) -> str:
    """A name that no start before this one had, also one that ended before it wrote a trace."""
    names = [path.name for path in (*root.logs.glob("start-*"), *root.traces.glob("*/segment-start-*"))]
    numbers = [int(number) for name in names for number in re.findall(r"start-(\d+)", name)]
    return f"start-{max(numbers, default=-1) + 1:03d}"


@contextmanager
def _alone(root: RunDir) -> Iterator[None]:
    """Hold the run's folder, which one training at a time may write; the lock ends with the process."""
    root.root.mkdir(parents=True, exist_ok=True)
    with (root.root / ".training").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DisttrainError(f"Another training of this run is under way in {root.root}",
                                 next_step="Wait for it, or give this one another name in its run file.") from None
        yield


class _Reports:
    """Follows the file to which rank 0 appends one line per step."""

    def __init__(self, path: Path, on_step: Callable[[dict[str, Any]], None] | None, progress: Progress,
                 total: int) -> None:
        self._file = path.open()
        self._on_step, self._progress, self._total = on_step, progress, total
        self._partial = ""
        self.steps: list[dict[str, Any]] = []

    def poll(self) -> None:
        """Take in the steps reported since the last call."""
        *lines, self._partial = (self._partial + self._file.read()).split("\n")
        for line in lines:
            row = json.loads(line)
            step = {"step": row["step"], "loss": row["loss"],
                    "losses": {"text": row["loss_text"], "image": row["loss_image"]},
                    **{key: row[key] for key in ("grad_norm", "iteration_s", "sequences_per_s", "mfu",
                                                 "data_wait_s")}}
            self.steps.append(step)
            if self._on_step is not None:
                self._on_step(step)
            self._progress("training", row["step"] + 1, self._total)


def _checked_index(run: Run, profile: Profile) -> Index:
    """The data's index; data other than those profiled are refused before anything is moved or started."""
    index = read_index(run, profile.inputs)
    if index.fingerprint != profile.fingerprints.data:
        raise MismatchError("The dataset is not the one that was profiled",
                            f"data of the profile: {profile.fingerprints.data}; of the index: {index.fingerprint}",
                            "Profile and plan again: disttrain profile && disttrain plan")
    return index


def _step_to_resume(run: Run, profile: Profile) -> int:
    root = run.dir
    newest = latest(root.checkpoints)
    if newest is None:
        earlier = sorted(path.parent.parent for path in (root.root / "earlier").glob("*/checkpoints/step-*"))
        raise SpecError(f"There is no checkpoint to resume from in {root.checkpoints}",
                        f"an earlier start left some: {earlier[-1]}" if earlier else "",
                        f"Move {earlier[-1] / 'checkpoints'} there, or start without --resume." if earlier
                        else "Start without --resume.")
    return check_belongs(newest, run.file.model_fingerprint(), profile.fingerprints.data)


def _move_aside(root: Path) -> None:
    """Keep what an earlier start left, under `earlier/NNN/`."""
    left = [root / name for name in ("traces", "checkpoints", "images") if (root / name).exists()]
    if left:
        numbers = [int(path.name) for path in (root / "earlier").glob("*") if path.name.isdigit()]
        folder = root / "earlier" / f"{max(numbers, default=-1) + 1:03d}"
        folder.mkdir(parents=True)
        for path in [*left, *([root / "logs"] if (root / "logs").exists() else [])]:
            shutil.move(path, folder / path.name)


def _skipped(run: Run, index: Index) -> list[dict[str, str]]:
    """Samples that indexing left out, and images that training could not decode."""
    found = {f"{entry.shard}/{entry.key}".rstrip("/"): entry.reason for entry in index.skipped}
    for path in sorted(run.dir.logs.glob("skipped-rank-*.json")):
        found.update(json.loads(path.read_text()))
    return [{"sample": name, "reason": reason} for name, reason in sorted(found.items())]


def _generate(run: Run, profile: Profile, checkpoint: Path, progress: Progress) -> list[str]:
    """Images from the trained model, where it has a generator."""
    if profile.inputs.target is None or not run.file.samples.images:
        return []
    progress("generating images", 0, 0)
    folder = run.dir.images / checkpoint.name
    launching.launch(1, "disttrain_cli.runtime.sampling:main",
                     {"run": str(run.path.resolve()), "profile": profile.model_dump(mode="json"),
                      "checkpoint": str(checkpoint), "images": str(folder)}, run.dir.logs / "sampling")
    return [str(path) for path in sorted(folder.glob("*.png"))]


def _references(run: Run, index: Index) -> dict[str, float]:
    """What a model that has learned nothing reaches: the data's unigram entropy, and predicting zero noise."""
    references = {"text_unigram_entropy": unigram_entropy(run, index)}
    if index.inputs.target is not None:
        references["image_zero_noise"] = 1.0
    return references
