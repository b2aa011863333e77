"""Launcher of a training job: prepares the run's folder, starts the ranks, and collects reports."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from disttrain_cli.calls import argument, call
from disttrain_cli.data.epochs.mixture import mixture_of
from disttrain_cli.data.index.index_checks import check_profiled_data
from disttrain_cli.data.index.sample_index import Index, read_index
from disttrain_cli.data.latents import described
from disttrain_cli.data.metrics import check_scores
from disttrain_cli.data.packing import SequenceStream
from disttrain_cli.errors import SpecError, UsageError
from disttrain_cli.runtime.checkpoints.folder import trained
from disttrain_cli.runtime.checkpoints.phases import check_begins
from disttrain_cli.runtime.launching.devices import visible_devices
from disttrain_cli.runtime.launching.payload import PREFLIGHT, TRAIN, payload_of
from disttrain_cli.runtime.launching.starts import (
    Reports,
    alone,
    check_fresh,
    job_of,
    run_ranks,
    step_to_resume,
)
from disttrain_cli.runtime.launching.supervise import (
    Planned,
    Replanned,
    Replanner,
    Supervisor,
    merged,
    stop_request,
)
from disttrain_cli.runtime.outputs.during import During, sample_trained
from disttrain_cli.runtime.watching.core_wait import OtherProcesses
from disttrain_cli.spec.learning import Learning
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.samples import Samples


class TrainResult(BaseModel):
    """Output of `train --json`."""

    run_dir: str
    planned: Planned = Field(exclude=True)  # plan of the last start
    steps: list[dict[str, Any]]
    skipped_samples: list[dict[str, str]]
    resumed_from_step: int | None
    # folder of the checkpoint or export with the initial weights
    started_from: str | None = None
    checkpoint: str | None  # the newest, or with train.evaluation.keep_best the best
    trace: str
    images: list[str]
    samples: Samples | None = None  # images and texts of the trained model, if any
    learning: Learning = Learning("too early to say")
    restarts: list[str] = []  # reasons for restarts
    replans: list[Replanned] = []  # the restarts with another plan
    # mean number of this host's cores in use by other processes; None where unknown
    other_cores: float | None = None
    stopped_by: str | None = None  # the one of `watch.REASONS` that ended the run early


def train(
    run: Run,
    plan: Plan,
    profile: Profile,
    *,
    steps: int | None = None,
    resume: bool = False,
    restart: bool = False,
    profile_steps: range | None = None,
    origin: Path | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress = silent,
    note: Callable[[str], object] = lambda sentence: None,
    again: Callable[..., str] = partial(call, "train"),
    replanner: Replanner | None = None,
) -> TrainResult:
    """Run the plan to `steps` optimizer steps and generate sample images.

    The plan must have been checked against the run and profile (`planning.check`). SIGTERM and
    SIGINT end the run after the current step, with a checkpoint; it is restarted after a rank dies
    or hangs, up to `train.restarts` times, and for a better plan of `replanner`.

    Args:
        again: spells the call with `resume` or `restart`, for errors.
        steps: None = the run file's.
        resume: continue from the newest checkpoint.
        restart: start at step 0 even if there is a checkpoint, and move the existing output to
            `earlier/`.
        profile_steps: steps that every rank records with torch's profiler.
        origin: source of a fresh start's weights (`checkpoints.origin`).
        note: called with sentences about the initial weights, once they are known to fit.

    Raises:
        SpecError: the plan's ranks belong on several hosts; there is nothing to resume from, or
            there is, and neither `resume` nor `restart` is set; or a folder of the run cannot be
            written.
        DataError: a package that `samples.judge` needs is not installed.
        UsageError: the run has none of the steps to profile, or is past them.
        MismatchError: the dataset or the checkpoint is not the one of the profile, or no
            preprocessing worker is of this run.
        RankFailedError: a rank failed.
    """
    _check_one_host(run, plan, profile)
    check_scores(run.file.samples)
    index = _checked_index(run, profile)
    root, total = run.dir, steps if steps is not None else run.file.train.total_steps
    resumed = step_to_resume(run, profile, root, total) if resume else None
    if not (resume or restart):
        check_fresh(root, again)
    if not resume:
        check_begins(profile)
    if profile_steps is not None:
        check_profiled(profile_steps, total, resumed or 0)
    if run.file.preprocess.addresses:
        from disttrain_cli.data.serving.client import check_workers

        check_workers(run, plan.plan, index, profile, total, progress)
    batch = run.file.train.global_batch_size
    mixture = mixture_of(index, run.file.train.seed, profile.data, batch)
    SequenceStream(mixture, progress).epoch_of((resumed or 0) * batch)  # before ranks need it
    rows: list[dict[str, Any]] = []

    def take(step: dict[str, Any]) -> None:
        rows.append(step)
        if on_step is not None:
            on_step(step)

    during = During(run, profile, total, progress)
    said_once = cache(note)  # restarts repeat the notes

    def start(planned: Planned, resume: bool, watch: Callable[[], None]) -> Reports:
        def look() -> None:
            during.look()
            watch()

        return run_ranks(
            root,
            job_of(run, *planned),
            TRAIN,
            planned.plan.plan.gpus_used,
            payload_of(run, *planned, profile_steps, origin),
            steps=total,
            resume=resume,
            on_step=take,
            progress=progress,
            note=said_once,
            watch=look,
            wait=lambda: request.end_before_ranks(progress),
            variables=visible_devices(
                planned.profile.device.kind,
                planned.profile.device.count,
                planned.plan.plan.left_out,
                os.environ,
            ),
        )

    others = OtherProcesses()
    with closing(during), stop_request() as request:
        went = Supervisor(
            root,
            Planned(plan, profile),
            run.file.train.restarts,
            run.file.train.longest_hang_s,
            request,
            progress,
            lambda: len(rows),
            replanner,
        ).run(resume, start)
    other_cores = others.cores()
    newest, samples = trained(run), None
    if newest is not None and not went.stopped:
        samples = sample_trained(run, went.planned.profile, newest, progress)
    return TrainResult(
        run_dir=str(root.root),
        planned=went.planned,
        steps=merged(rows),
        skipped_samples=_skipped(run, index),
        resumed_from_step=resumed,
        started_from=str(origin) if origin else None,
        checkpoint=str(newest) if newest else None,
        trace=str(root.traces),
        images=(
            [str(root.images / newest.name / one.file) for one in samples.drawn]
            if samples and newest
            else []
        ),
        samples=samples,
        restarts=went.restarts,
        replans=went.replans,
        other_cores=other_cores,
        stopped_by=went.stopped,
    )


def preflight(run: Run, plan: Plan, profile: Profile, *, progress: Progress = silent) -> list[str]:
    """Start the ranks, connect and test their groups, and end; return rank 0's reports.

    Raises:
        MismatchError: the dataset is not the one of the profile.
        RankFailedError: a test failed; the rank's error is included.
    """
    _checked_index(run, profile)
    reports: list[str] = []

    def collect(what: str, done: float, total: int) -> None:
        reports.append(what)
        progress(what, done, total)

    folder = run.dir.preflight
    with alone(folder):
        run_ranks(
            folder,
            job_of(run, plan, profile),
            PREFLIGHT,
            plan.plan.gpus_used,
            payload_of(run, plan, profile),
            steps=0,
            resume=True,
            on_step=None,
            progress=collect,
        )
    return reports[1:]  # without the launcher's note


def check_profiled(steps: range, total: int, first: int = 0) -> None:
    """Raise UsageError if steps `first` to `total` - 1 do not include the steps to profile."""
    if not isinstance(steps, range) or steps.step != 1 or not 0 <= steps.start < steps.stop:
        raise UsageError(
            f"{argument('profile_steps')} must be a range of steps",
            f"given: {steps!r}",
            f"Give one such as {argument('profile_steps', range(5, 8))}.",
        )
    if steps.stop > total:
        raise UsageError(
            f"{argument('profile_steps', steps)} goes beyond the run's last step",
            f"the run has {total} steps, numbered from 0, so the range may end at {total}",
            "Give more steps, or an earlier range, such as"
            f" {argument('profile_steps', range(max(0, total - 3), total))}",
        )
    if steps.stop <= first:
        raise UsageError(
            f"{argument('profile_steps', steps)} is past",
            f"the run goes on from its checkpoint of step {first}",
            "Profile later steps:"
            f" {argument('profile_steps', range(first, min(total, first + 3)))}",
        )


def _check_one_host(run: Run, plan: Plan, profile: Profile) -> None:
    """Raise SpecError if CUDA ranks belong on several hosts, which this launcher cannot start."""
    cluster = run.file.cluster
    if (
        profile.device.kind == "cuda"
        and cluster.nodes > 1
        and plan.plan.gpus_used > cluster.gpus_per_node
    ):
        raise SpecError(
            f"The plan's {plan.plan.gpus_used} ranks belong on several hosts",
            f"cluster.nodes: {cluster.nodes}, cluster.gpus_per_node: {cluster.gpus_per_node}",
            f"Write scripts that start them there: {call('emit', kind='slurm')}, or"
            f" {argument('kind', 'torchrun')}",
        )


def _checked_index(run: Run, profile: Profile) -> Index:
    """Return the data's index, after checking it and cached latents against the profile.

    Nothing has been moved or started by then.
    """
    index = read_index(run, profile.inputs)
    check_profiled_data(index.fingerprint, profile)
    described(run, index)
    return index


def _skipped(run: Run, index: Index) -> list[dict[str, str]]:
    """Return samples that indexing skipped, and images that training could not decode."""
    skipped = [(f"{entry.shard}/{entry.key}".rstrip("/"), entry.reason) for entry in index.skipped]
    # several ranks may name the same sample, and a JSON may have several of one `id`
    of_ranks = {
        (name, reason)
        for path in run.dir.logs.glob("skipped-rank-*.json")
        for name, reason in json.loads(path.read_text())
    }
    return [{"sample": name, "reason": reason} for name, reason in sorted([*skipped, *of_ranks])]
