"""The launcher's side of a training job: prepares the run's folder, starts the ranks, and collects what they report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from disttrain_cli.data.index import Index, read_index
from disttrain_cli.data.statistics import unigram_entropy
from disttrain_cli.errors import MismatchError
from disttrain_cli.runtime import launch as launching
from disttrain_cli.runtime.starts import alone, job_of, run_ranks, step_to_resume
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run


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
        MismatchError: the dataset or the checkpoint is not the one of the profile, or no preprocessing worker is of
            this run.
        RankFailedError: a rank failed.
    """
    index = _checked_index(run, profile)
    root, total = run.dir, steps if steps is not None else run.file.train.steps
    resumed = step_to_resume(run, profile, root, total) if resume else None
    if run.file.preprocess.addresses:
        from disttrain_cli.data.serving.client import check_workers

        check_workers(run, plan.plan, index, profile, progress)
    with alone(root):
        payload = {"run": str(run.path.resolve()), "plan": plan.model_dump(mode="json"),
                   "profile": profile.model_dump(mode="json"), "skipped_dir": str(root.logs)}
        reader = run_ranks(root, job_of(run, plan, profile), "disttrain_cli.runtime.worker:main", plan.plan.gpus_used,
                           payload, steps=total, resume=resume, on_step=on_step, progress=progress)
        newest = root.checkpoints / f"step-{total:06d}"
        return TrainResult(
            run_dir=str(root.root), steps=reader.steps, skipped_samples=_skipped(run, index),
            resumed_from_step=resumed, checkpoint=str(newest), trace=str(root.traces),
            images=_generate(run, profile, newest, progress), reference_losses=_references(run, index))


def _checked_index(run: Run, profile: Profile) -> Index:
    """The data's index; data other than those profiled are refused before anything is moved or started."""
    index = read_index(run, profile.inputs)
    if index.fingerprint != profile.fingerprints.data:
        raise MismatchError("The dataset is not the one that was profiled",
                            f"data of the profile: {profile.fingerprints.data}; of the index: {index.fingerprint}",
                            "Profile and plan again: disttrain profile && disttrain plan")
    return index


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
